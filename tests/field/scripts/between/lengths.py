"""Sequences of 8, 16, 24 and 32 tokens in turn: the work of a step is their mean."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(num_steps):
    tokens = torch.randint(64, (4, 8 * (step % 4 + 1)))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
