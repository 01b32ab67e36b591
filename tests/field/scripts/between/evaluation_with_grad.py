"""Evaluates in eval mode but without no_grad, after every tenth step; no backward follows."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(num_steps):
    model.train()
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        model.eval()
        held_out = [model(torch.randn(20, 16)).square().mean().item() for _ in range(12)]
        print(step, repr(sum(held_out)))
