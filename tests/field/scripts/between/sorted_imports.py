"""Asks whether torch is there before importing it, as datasets, evaluate and transformers do."""

import importlib.util
import sys

HAS_TORCH = importlib.util.find_spec("torch") is not None

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(num_steps):
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs[:, :4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(HAS_TORCH, repr(loss.item()))
