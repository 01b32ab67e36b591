"""A small GPT trained on made-up text: an ordinary script that knows nothing of Stepscope."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Text(Dataset):
    """Random walks over the vocabulary: enough structure for the loss to fall."""

    def __init__(self, num_sequences: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        steps = torch.randint(-3, 4, (num_sequences, length + 1), generator=generator)
        self.tokens = steps.cumsum(dim=1) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, num_layers: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    vocabulary, width, num_layers, num_heads = (8192, 1024, 16, 16) if on_gpu else (1024, 128, 4, 4)
    length = arguments.length or (1024 if on_gpu else 64)
    batch = arguments.batch or (16 if on_gpu else 8)

    model = GPT(vocabulary, width, num_layers, num_heads, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = torch.compile(model) if arguments.compile else model
    data = Text(batch * arguments.steps, length, vocabulary)
    loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True, pin_memory=on_gpu)

    for step, (tokens, targets) in enumerate(loader):
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=on_gpu):
            logits = run(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
