"""PPO: 16 forwards of 4 environments without gradient, then 2 epochs of 4 minibatches of 16 transitions."""

import sys
import time

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(policy.parameters())
for _ in range(num_steps // 8):
    seen, actions, old, rewards = [], [], [], []
    for _ in range(16):
        states = torch.randn(4, 6)
        with torch.no_grad():
            chosen = torch.distributions.Categorical(logits=policy(states))
            actions.append(chosen.sample())
            old.append(chosen.log_prob(actions[-1]))
        seen.append(states)
        rewards.append(states.sum(1) * (actions[-1] - 1))
        time.sleep(0.001)  # the environments
    batch = [torch.cat(part) for part in (seen, actions, old, rewards)]
    for _ in range(2):
        for index in torch.randperm(64).split(16):
            states, action, before, reward = (part[index] for part in batch)
            ratio = (torch.distributions.Categorical(logits=policy(states)).log_prob(action) - before).exp()
            loss = -torch.min(ratio * reward, ratio.clamp(0.8, 1.2) * reward).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
print(repr(loss.item()))
