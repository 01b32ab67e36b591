"""Lightning Fabric: one's own loop, with its backward and its optimizer wrapped."""

import sys

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_steps = int(sys.argv[1])
seed_everything(0, verbose=False)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
tokens = torch.randint(64, (4 * num_steps, 12))
for (batch,) in fabric.setup_dataloaders(DataLoader(TensorDataset(tokens), batch_size=4)):
    loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
print(repr(loss.item()))
