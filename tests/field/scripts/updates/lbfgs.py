"""LBFGS: up to 10 forwards and backwards of the same batch in one update."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
inputs = torch.randn(20, 8)
targets = inputs.prod(1, keepdim=True)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=10)


def closure():
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    return loss


for _ in range(num_steps):
    loss = optimizer.step(closure)
print(repr(loss.item()))
