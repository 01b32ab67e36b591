"""Cross-validation: a new model and a new optimizer for each fold of 12 steps, evaluated after every fourth."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)


def evaluate(model):
    model.eval()
    with torch.no_grad():
        return model(torch.randn(64, 16)).square().mean()


def train_fold():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(12):
        model.train()
        inputs = torch.randn(8, 16)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            evaluate(model)
    return loss.item()


print([train_fold() for _ in range(num_steps // 12)])
