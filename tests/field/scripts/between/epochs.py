"""Epochs of 13 batches whose last is half full, new workers each epoch, a test after each."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_steps = int(sys.argv[1])
torch.manual_seed(0)
inputs, labels = torch.randn(100, 32), torch.randint(4, (100,))
training = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True, num_workers=1)
test = DataLoader(TensorDataset(inputs, labels), batch_size=50, num_workers=1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(num_steps // 13):
    model.train()
    for batch, targets in training:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), targets).backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        num_right = sum((model(batch).argmax(1) == targets).sum().item() for batch, targets in test)
    print(epoch, num_right)
