"""Trains in a thread other than the main one, as Ray Train does."""

import sys
import threading

import torch
from torch import nn


def train(num_steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        inputs = torch.randn(8, 16)
        loss = (model(inputs) - inputs[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(repr(loss.item()))


thread = threading.Thread(target=train, args=(int(sys.argv[1]),))
thread.start()
thread.join()
