"""Wasserstein GAN: five updates of the critic, with penalty and clipped weights, to one of the generator."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
critic = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
of_generator = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
for _ in range(num_steps):
    for _ in range(5):
        real, made = torch.randn(16, 64), generator(torch.randn(16, 8)).detach()
        between = (real + made).div(2).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        of_critic.zero_grad()
        (critic(made).mean() - critic(real).mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        of_critic.step()
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    of_generator.zero_grad()
    loss = -critic(generator(torch.randn(16, 8))).mean()
    loss.backward()
    of_generator.step()
print(repr(loss.item()))
