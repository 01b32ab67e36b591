"""Evaluates 60 batches before the first step, as nanoGPT does, and 8 batches before every 20th."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters())


def loss_of(tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@torch.no_grad()
def evaluate(num_batches: int) -> float:
    model.eval()
    losses = [loss_of(torch.randint(64, (4, 16))).item() for _ in range(num_batches)]
    model.train()
    return sum(losses) / num_batches


for step in range(num_steps):
    if step % 20 == 0:
        print(step, repr(evaluate(8 if step else 60)))
    optimizer.zero_grad()
    loss = loss_of(torch.randint(64, (4, 16)))
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
