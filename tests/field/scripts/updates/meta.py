"""MAML: two functional inner updates per task and four tasks in one update of the parameters."""

import sys

import torch
from torch import nn
from torch.func import functional_call

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(num_steps):
    optimizer.zero_grad()
    for _ in range(4):
        inputs, weights = torch.randn(10, 8), torch.randn(8, 1)
        parameters = dict(model.named_parameters())
        for _ in range(2):
            loss = (functional_call(model, parameters, inputs) - inputs @ weights).square().mean()
            gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            parameters = {name: value - 0.1 * g for (name, value), g in zip(parameters.items(), gradients)}
        loss = (functional_call(model, parameters, inputs) - inputs @ weights).square().mean()
        loss.backward()
    optimizer.step()
print(repr(loss.item()))
