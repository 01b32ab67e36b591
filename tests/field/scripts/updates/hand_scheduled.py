"""Hand-written SGD with momentum and accumulation of two micro-batches, in a function, with autograd.grad."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
parameters = list(model.parameters())
momenta = [torch.zeros_like(parameter) for parameter in parameters]


@torch.no_grad()
def update(gradients: list[torch.Tensor], rate: float) -> None:
    for parameter, momentum, gradient in zip(parameters, momenta, gradients):
        momentum.mul_(0.9).add_(gradient)
        parameter.add_(momentum, alpha=-rate)


for step in range(num_steps):
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for _ in range(2):
        inputs = torch.randn(8, 16)
        loss = (model(inputs) - inputs).square().mean()
        for sum_so_far, gradient in zip(total, torch.autograd.grad(loss, parameters)):
            sum_so_far += gradient / 2
    update(total, rate=0.1 / (1 + step / 10))
print(repr(loss.item()))
