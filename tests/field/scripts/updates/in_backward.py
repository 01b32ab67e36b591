"""An optimizer for each parameter, stepped from within the backward, as the PyTorch tutorial that saves memory."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}


def update(parameter: torch.Tensor) -> None:
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for _ in range(num_steps):
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs[:, :4]).square().mean()
    loss.backward()
print(repr(loss.item()))
