"""A critic that learns from five batches of a loader, then its generator learns once; epochs end anywhere."""

import itertools
import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
of_generator, of_critic = torch.optim.RMSprop(generator.parameters()), torch.optim.RMSprop(critic.parameters())
data = torch.utils.data.DataLoader(torch.randn(56, 4), batch_size=8, shuffle=True)
batches = itertools.chain.from_iterable(itertools.repeat(data))
for i, real in zip(range(5 * num_steps), batches):
    made = generator(torch.randn(8, 6)).detach()
    of_critic.zero_grad()
    (critic(made).mean() - critic(real).mean()).backward()
    of_critic.step()
    if i % 5 == 4:
        of_generator.zero_grad()
        loss = -critic(generator(torch.randn(8, 6))).mean()
        loss.backward()
        of_generator.step()
print(repr(loss.item()))
