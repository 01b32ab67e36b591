"""A GradScaler that skips every tenth update: the loss overflows."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(num_steps):
    inputs = torch.randn(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(inputs) - inputs[:, :4]).square().mean()
    loss = loss * (float("inf") if step % 10 == 3 else 1.0)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(repr(loss.item()), scaler.get_scale())
