"""Two GANs one after the other, 20 steps each. The critic's pictures are made without gradients."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
for _ in range(num_steps // 20):
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
    critic = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    for _ in range(20):
        with torch.no_grad():
            made = generator(torch.randn(16, 8))
        of_critic.zero_grad()
        (critic(made).mean() - critic(torch.randn(16, 64)).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = -critic(generator(torch.randn(16, 8))).mean()
        loss.backward()
        of_generator.step()
print(repr(loss.item()))
