"""Opacus: differentially private SGD, which wraps model, optimizer and DataLoader; batches are drawn by chance."""

import sys
import warnings

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
num_steps = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(160, 32), torch.randint(4, (160,))), batch_size=8)
model, optimizer, data = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=data,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for _ in range(num_steps // 20):
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
print(repr(loss.item()))
