"""schedulefree: an optimizer with a train and an eval mode, which changes the parameters for each evaluation."""

import sys

import schedulefree
import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
for step in range(num_steps):
    model.train()
    optimizer.train()
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            print(step, repr(model(torch.ones(4, 16)).sum().item()))
print(repr(loss.item()))
