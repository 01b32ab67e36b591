"""New leaf tensors each step, by torch.autograd.grad: nothing is changed in place."""

import sys

import torch
from torch import nn
from torch.func import functional_call

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
parameters = dict(model.named_parameters())
for _ in range(num_steps):
    tokens = torch.randint(32, (4, 6))
    loss = nn.functional.cross_entropy(functional_call(model, parameters, tokens).flatten(0, 1), tokens.flatten())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    parameters = {
        name: (value - 0.1 * gradient).detach().requires_grad_()
        for (name, value), gradient in zip(parameters.items(), gradients)
    }
print(repr(loss.item()))
