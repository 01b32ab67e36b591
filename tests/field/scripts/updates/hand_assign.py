"""No optimizer: each parameter's data is replaced."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
for _ in range(num_steps):
    tokens = torch.randint(32, (3, 10))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad
print(repr(loss.item()))
