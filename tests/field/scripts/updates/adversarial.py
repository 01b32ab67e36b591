"""Adversarial training: three backwards that change the inputs, then one that changes the parameters."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(num_steps):
    inputs, labels = torch.randn(8, 16), torch.randint(4, (8,))
    attacked = inputs.clone().requires_grad_()
    for _ in range(3):
        nn.functional.cross_entropy(model(attacked), labels).backward()
        with torch.no_grad():
            attacked += 0.01 * attacked.grad.sign()
            attacked.grad = None
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(attacked.detach()), labels)
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
