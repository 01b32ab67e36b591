"""No module and no optimizer: two weight matrices updated in place, as in the first PyTorch tutorials."""

import sys

import torch

num_steps = int(sys.argv[1])
torch.manual_seed(0)
first = torch.randn(32, 64, requires_grad=True)
second = torch.randn(64, 8, requires_grad=True)
for _ in range(num_steps):
    inputs = torch.randn(16, 32)
    loss = (inputs.mm(first).clamp(min=0).mm(second) - inputs[:, :8]).square().mean()
    loss.backward()
    with torch.no_grad():
        first -= 1e-3 * first.grad
        second -= 1e-3 * second.grad
        first.grad = second.grad = None
print(repr(loss.item()))
