"""Models with one planted cause each that torch.compile stumbles over; the line is marked."""

from __future__ import annotations

import torch
from torch import nn


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        print("", end="")  # planted: graph break
        return self.second(y)


class Counts(nn.Module):
    """A number of its own that is another one in every step."""

    def __init__(self):
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), 0

    def forward(self, x):
        return self.linear(x) * (self.step + 1)  # planted: recompile


class Rotary(nn.Module):
    """Registers its table again in every forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cosines", torch.ones(4))

    def forward(self, x):
        self.register_buffer("cosines", torch.cos(torch.arange(4.0)), persistent=False)  # planted: buffer
        return self.linear(x) * self.cosines


class GrowingRotary(nn.Module):
    """Registers a table that is longer than the one it was made with."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cosines", torch.ones(1, 4), persistent=False)

    def forward(self, x):
        table = torch.cos(torch.arange(float(len(x))))[:, None].expand(-1, 4)
        self.register_buffer("cosines", table, persistent=False)  # planted: longer buffer
        return self.linear(x) * self.cosines


class Experts(nn.Module):
    """A loop over experts, each with as many rows as the data says."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).flatten()  # planted: data-dependent shape
            if rows.numel():
                out[rows] = expert(x[rows])
        return out
