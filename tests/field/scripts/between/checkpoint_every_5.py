"""Saves model and optimizer after every fifth step; the last file must not need Stepscope to be loaded."""

import sys
from pathlib import Path

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(num_steps):
    inputs = torch.randn(8, 64)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 5 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.pt")
torch.save(model, "model.pt")
print(repr(loss.item()), *(b"stepscope" in Path(name).read_bytes() for name in ("checkpoint.pt", "model.pt")))
