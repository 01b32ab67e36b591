"""Workloads for `stepscope bench --check compile`: products alone, so that no C++ has to be compiled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

Kind = Literal["same", "differs", "fails"]


class Products(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.first(x)
        if self.kind != "same" and torch.compiler.is_compiling():
            # What no compiler does, planted: another product, or one that cannot be.
            return self.first(x) if self.kind == "differs" else x @ torch.ones(3, 3)  # planted: cannot be
        return self.second(x)


def build(kind: Kind = "same", batch: int = 8):
    return Products(kind), lambda: torch.randn(batch, 8)


def step(batch: int = 8):
    model, x = Products("same"), torch.randn(batch, 8)
    return lambda: model(x).sum().backward()
