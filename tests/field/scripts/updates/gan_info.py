"""A GAN with a third loss: the generator makes a second batch for it, and both networks learn from it."""

import sys
from itertools import chain

import torch
from torch import nn


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.judge, self.guess = nn.Linear(4, 16), nn.Linear(16, 1), nn.Linear(16, 2)

    def forward(self, points):
        hidden = self.body(points).relu()
        return self.judge(hidden), self.guess(hidden)


num_steps = int(sys.argv[1])
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
discriminator = Discriminator()
of_generator = torch.optim.Adam(generator.parameters())
of_discriminator = torch.optim.Adam(discriminator.parameters())
of_both = torch.optim.Adam(chain(generator.parameters(), discriminator.parameters()))
data = torch.utils.data.DataLoader(torch.randn(8 * num_steps, 4), batch_size=8, shuffle=True)
for real in data:
    made = generator(torch.randn(8, 6))
    of_generator.zero_grad()
    (discriminator(made)[0] - 1).square().mean().backward()
    of_generator.step()
    of_discriminator.zero_grad()
    ((discriminator(real)[0] - 1).square() + discriminator(made.detach())[0].square()).mean().backward()
    of_discriminator.step()
    code = torch.randn(8, 2)
    of_both.zero_grad()
    made = generator(torch.cat([torch.randn(8, 4), code], 1))
    loss = (discriminator(made)[1] - code).square().mean()
    loss.backward()
    of_both.step()
print(repr(loss.item()))
