"""Evaluates after every fifth step, on slow data: 20 ms that the median step does not have."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.0025)
        return torch.full((16,), index / 8)


num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
held_out = DataLoader(Slow(), batch_size=4)
for step in range(num_steps):
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 5 == 0:
        model.eval()
        with torch.no_grad():
            total = sum((model(inputs) - inputs).square().mean().item() for inputs in held_out)
        model.train()
        print(step, repr(total))
