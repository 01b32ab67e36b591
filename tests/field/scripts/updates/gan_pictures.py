"""A GAN that looks at 64 pictures now and then, with gradients on and without a backward: they are no batch."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
critic = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
loss_of = nn.BCEWithLogitsLoss()
fixed = torch.randn(64, 8)
for step in range(num_steps):
    of_critic.zero_grad()
    loss_of(critic(torch.randn(16, 64)), torch.ones(16, 1)).backward()
    made = generator(torch.randn(16, 8))
    loss_of(critic(made.detach()), torch.zeros(16, 1)).backward()
    of_critic.step()
    of_generator.zero_grad()
    loss_of(critic(made), torch.ones(16, 1)).backward()
    of_generator.step()
    if step % 4 == 0:
        print(step, repr(generator(fixed).detach().mean().item()))
