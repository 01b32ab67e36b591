"""A moving average of the weights, changed in place after each update, and a teacher that runs without gradient."""

import copy
import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
teacher = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(num_steps):
    inputs = torch.randn(8, 16)
    with torch.no_grad():
        targets = teacher(inputs)
    loss = (model(inputs + 0.1 * torch.randn_like(inputs)) - targets - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(teacher.parameters(), model.parameters()):
            mean.lerp_(parameter, 0.01)
print(repr(loss.item()))
