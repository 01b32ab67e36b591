"""Sleeps 30 ms after every fourth step, and has no DataLoader that could be blamed."""

import sys
import time

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(num_steps):
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 4 == 0:
        time.sleep(0.03)
print(repr(loss.item()))
