"""Two models, two optimizers: one step is one update of each. 16 real images, 16 made ones, are 16 samples."""

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
real, fake = torch.ones(16, 1), torch.zeros(16, 1)
for _ in range(num_steps):
    of_critic.zero_grad()
    loss_of(critic(torch.randn(16, 64)), real).backward()
    made = generator(torch.randn(16, 8))
    loss_of(critic(made.detach()), fake).backward()
    of_critic.step()
    of_generator.zero_grad()
    loss = loss_of(critic(made), real)
    loss.backward()
    of_generator.step()
print(repr(loss.item()))
