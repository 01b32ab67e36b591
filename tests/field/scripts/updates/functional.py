"""torch.func: the gradient of a function of the parameters, and new parameters each step. The module's own stay."""

import sys

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_of(parameters: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return (functional_call(model, parameters, (inputs,)) - inputs).square().mean()


for _ in range(num_steps):
    gradients, loss = grad_and_value(loss_of)(parameters, torch.randn(10, 16))
    parameters = {name: parameter - 0.1 * gradients[name] for name, parameter in parameters.items()}
print(repr(loss.item()))
