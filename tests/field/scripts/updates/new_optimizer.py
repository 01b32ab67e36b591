"""A new optimizer each epoch of ten steps, for the same parameters."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
for epoch in range(num_steps // 10):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 / (epoch + 1))
    for _ in range(10):
        inputs = torch.randn(8, 16)
        loss = (model(inputs) - inputs[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(repr(loss.item()))
