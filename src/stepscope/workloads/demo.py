"""The script of `stepscope demo`: a small picture classifier with a slow step, because each picture is decoded in the
training process. docs/tutorial.md finds the cause and proves the fix.

Imports torch and nothing of Stepscope: it is measured as any script is.
"""

import argparse
import zlib

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIDE = 64


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures that are stored compressed, as files would be."""

    def __init__(self, num_pictures: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pictures = torch.randint(0, 64, (num_pictures, 3 * SIDE * SIDE), generator=generator)
        self.stored = [zlib.compress(bytes(picture.tolist())) for picture in pictures]

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = torch.frombuffer(bytearray(zlib.decompress(self.stored[index])), dtype=torch.uint8)
        picture = picture.view(3, SIDE, SIDE).float()
        return (picture - picture.mean()) / picture.std(), index % 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small picture classifier.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(1024), batch_size=64, num_workers=arguments.workers)
    step = 0
    while step < arguments.steps:
        for pictures, labels in loader:
            loss = nn.functional.cross_entropy(model(pictures.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
            if step == arguments.steps:
                break


if __name__ == "__main__":
    main()
