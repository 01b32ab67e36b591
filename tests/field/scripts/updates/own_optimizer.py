"""An optimizer class of the script's own, which is no torch.optim.Optimizer."""

import sys

import torch
from torch import nn


class SignDescent:
    def __init__(self, parameters, rate=0.01):
        self.parameters, self.rate = list(parameters), rate

    def step(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(parameter.grad.sign(), alpha=-self.rate)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = SignDescent(model.parameters())
for _ in range(num_steps):
    inputs = torch.randn(6, 16)
    loss = (model(inputs) - inputs[:, :4]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(repr(loss.item()))
