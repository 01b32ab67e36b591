"""The loop of every tutorial: a DataLoader, AdamW, one update a batch."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_steps = int(sys.argv[1])
torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(num_steps * 8, 32), torch.randint(4, (num_steps * 8,))), batch_size=8)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
for inputs, labels in data:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
