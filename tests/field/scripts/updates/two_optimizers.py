"""One model, two optimizers: SGD for matrices, AdamW for the rest, both in every step (as with Muon)."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 64))
matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others)]
for _ in range(num_steps):
    tokens = torch.randint(64, (4, 8))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(repr(loss.item()))
