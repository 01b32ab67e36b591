"""A small picture classifier with a slow step: each picture is decoded and augmented in the training process.

    stepscope run examples/train_cnn.py

docs/tutorial.md finds the cause and proves the fix.
"""

import argparse
import zlib

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--workers", type=int, default=0)
args = parser.parse_args()


class Pictures(Dataset):
    """Pictures that are stored compressed, as files would be."""

    def __init__(self, num_pictures: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pictures = torch.randint(0, 64, (num_pictures, 3, 64, 64), generator=generator, dtype=torch.uint8)
        self.stored = [zlib.compress(picture.numpy().tobytes()) for picture in pictures]

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = torch.frombuffer(bytearray(zlib.decompress(self.stored[index])), dtype=torch.uint8)
        picture = picture.view(3, 64, 64).float() / 64
        return (picture - picture.mean()) / picture.std(), index % 10


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Pictures(2_048), batch_size=64, num_workers=args.workers)

step = 0
while step < args.steps:
    for pictures, labels in loader:
        loss = nn.functional.cross_entropy(model(pictures.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        if step == args.steps:
            break
