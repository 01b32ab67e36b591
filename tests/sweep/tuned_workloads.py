"""Workloads whose best knobs are known: they sleep; the tests give this file to `stepscope tune`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from stepscope.workloads.workload import Built, Workload, knob

NAPS_S = {"plain": 0.030, "quick": 0.008, "cheating": 0.0, "lazy": 0.001}


@dataclass(frozen=True, kw_only=True, slots=True)
class NapConfig:
    way: Literal["plain", "quick", "cheating", "lazy"] = knob("plain", "how long it sleeps, and whether it lies")
    batch: int = knob(4, "rows")
    most: int = knob(1000, "the batch above which there is no memory")


class Napping(nn.Module):
    """A linear layer that sleeps; `cheating` has another loss, `lazy` other gradients."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = nn.Linear(4, 1)

    def forward(self, x, targets):
        if self.config.batch > self.config.most:
            bytearray(1 << 45)
        time.sleep(NAPS_S[self.config.way])
        error = (self.layer(x) - targets).square().mean()
        if self.config.way == "lazy":
            return error.detach() + 0 * self.layer.weight.sum()
        return error * (1.02 if self.config.way == "cheating" else 1.0)


def build_nap(config):
    def batch():
        return {"x": torch.randn(config.batch, 4), "targets": torch.randn(config.batch, 1)}

    return Built(module=Napping(config), batch=batch, num_tokens=config.batch)


NAP = Workload(
    name="nap",
    about="sleeps",
    config=NapConfig,
    presets={"one": {}},
    build=build_nap,
    reference={"way": "plain"},
)


def own(fast: bool = False, batch: int = 4):
    """A factory that says nothing about its knobs, as users write them."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    forward = module.forward

    def slow_forward(x):
        time.sleep(0.002 if fast else 0.020)
        return forward(x).square().mean()

    module.forward = slow_forward
    return module, lambda: torch.randn(batch, 4), batch


def whole(nap_ms: int = 20):
    """One step of a loop of one's own."""
    weight = torch.ones(3, requires_grad=True)

    def step():
        time.sleep(nap_ms / 1e3)
        return weight.square().sum().detach()

    return step
