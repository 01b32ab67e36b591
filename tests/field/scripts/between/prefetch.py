"""Eight loader workers and a slow dataset: the queue is full at first, and drains."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return num_steps * 8

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((16,), index / len(self))


num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs in DataLoader(Slow(), batch_size=8, num_workers=8, prefetch_factor=4):
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
