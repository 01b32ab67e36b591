"""No optimizer: one `torch._foreach_add_` for all parameters, as Keras does."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
for _ in range(num_steps):
    inputs = torch.randn(12, 16)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-0.01)
    model.zero_grad()
print(repr(loss.item()))
