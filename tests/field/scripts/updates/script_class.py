"""Compiles a class with TorchScript, which looks up names where it was called from."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.jit.script
class Scaler:
    def __init__(self):
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scaled(x)


model, scaler = torch.jit.script(nn.Linear(4, 1)), Scaler()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(num_steps):
    loss = model(scaler(torch.randn(8, 4))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()), scaler.calls)
