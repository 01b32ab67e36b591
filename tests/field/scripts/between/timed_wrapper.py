"""A solver wraps the model anew in each step and calls it with a time first, 5 to 9 times. Each batch has 20 rows."""

import sys

import torch
from torch import nn

num_steps = int(sys.argv[1])
torch.manual_seed(0)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, time, y):
        return self.net(y)


class Wrapper(nn.Module):
    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self, time, y):
        return self.field(time, y)


def solve(field, y, num_calls):
    wrapped = Wrapper(field)
    for i in range(num_calls):
        y = y + 0.01 * wrapped(torch.tensor(0.1 * i), y)
    return y


field = Field()
optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
for step in range(num_steps):
    optimizer.zero_grad()
    loss = solve(field, torch.randn(20, 2), 5 + step % 5).abs().mean()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
