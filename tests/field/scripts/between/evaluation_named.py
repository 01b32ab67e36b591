"""A policy that is tested every 10 steps, in training mode and with gradients on: only its function says so."""

import sys
import time

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(policy.parameters())


def test(policy):
    for _ in range(20):
        torch.distributions.Categorical(logits=policy(torch.randn(6))).sample()
        time.sleep(0.005)


for step in range(num_steps):
    states = torch.randn(12, 6)
    loss = policy(states).log_softmax(-1)[:, 0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        test(policy)
print(repr(loss.item()))
