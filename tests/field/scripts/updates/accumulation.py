"""Gradient accumulation: four micro-batches of 2 x 16 tokens to an update."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for micro_step in range(4 * num_steps):
    tokens = torch.randint(64, (2, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    (loss / 4).backward()
    if (micro_step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
print(repr(loss.item()))
