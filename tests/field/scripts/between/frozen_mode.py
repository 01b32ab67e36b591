"""Trains in eval mode throughout (a pretrained normalization stays frozen): training all the same."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(num_steps):
    images, labels = torch.randn(6, 3, 8, 8), torch.randint(4, (6,))
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
