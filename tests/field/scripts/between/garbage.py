"""Collects garbage after every fifth step, as scripts do that fear for memory."""

import gc
import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = [[index] for index in range(100_000)]  # something to walk through
for step in range(num_steps):
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 5 == 0:
        gc.collect()
print(repr(loss.item()))
