"""Value learning in an environment: before each four updates, twelve best actions, which nothing samples or names."""

import sys
import types

import torch
from torch import nn

sys.modules.setdefault("gymnasium", types.ModuleType("gymnasium"))  # in place of the library that has environments

num_steps = int(sys.argv[1])
torch.manual_seed(0)
values = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(values.parameters())
states = torch.randn(4, 6)
for _ in range(num_steps // 4):
    seen, actions, rewards = [], [], []
    for _ in range(12):
        with torch.no_grad():
            best = values(states).argmax(1)
        action = torch.where(torch.rand(4) < 0.2, torch.randint(3, (4,)), best)
        seen.append(states)
        actions.append(action)
        rewards.append(states.sum(1) * (action - 1))
        states = torch.randn(4, 6)
    for part in torch.randperm(48).view(4, 12):
        predicted = values(torch.cat(seen)[part]).gather(1, torch.cat(actions)[part, None])[:, 0]
        loss = (predicted - torch.cat(rewards)[part]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(repr(loss.item()))
