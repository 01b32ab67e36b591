"""Workloads that misbehave in every way a row must survive; the tests give this file to `stepscope bench`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.workloads.workload import Built, Workload, knob, ran

Kind = Literal[
    "ok", "segfault", "exit", "sys_exit", "hang", "huge", "python_huge", "raise", "threads", "killed", "slow"
]  # fmt: skip
Trouble = Literal["none", "garbage", "daemon", "impossible"]


def build(kind: Kind = "ok", width: int = 8, batch: int = 2, pid_file: str = ""):
    """A two-layer network, unless something happens."""
    if pid_file:
        Path(pid_file).write_text(str(os.getpid()))
    if kind == "segfault":
        ctypes.string_at(0)
    elif kind == "exit":
        print("leaving", file=sys.stderr, flush=True)
        os._exit(3)
    elif kind == "sys_exit":
        sys.exit(4)
    elif kind == "hang":
        time.sleep(1000)
    elif kind == "slow":
        time.sleep(0.5)
    elif kind == "huge":
        torch.empty(1 << 40, dtype=torch.uint8)
    elif kind == "python_huge":
        bytearray(1 << 40)
    elif kind == "raise":
        raise ValueError("no such thing\nsecond line")
    elif kind == "killed":
        os.kill(os.getpid(), 9)
    elif kind == "threads":
        torch.set_num_threads(2)
        for _ in range(3):
            torch.randn(512, 512) @ torch.randn(512, 512)
        if len(list(Path("/proc/self/task").iterdir())) < 2:
            raise RuntimeError("no second thread")
    module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    return module, lambda: torch.randn(batch, width), batch


def troublesome(trouble: Trouble = "none", pid_file: str = ""):
    """Reaches beyond its own process."""
    if trouble == "garbage":  # into every pipe that was left open
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\xff\xfe garbage\n")
    elif trouble == "daemon":
        code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"
        subprocess.Popen([sys.executable, "-S", "-c", code, pid_file], start_new_session=True)
        while not (Path(pid_file).exists() and Path(pid_file).read_text()):
            time.sleep(0.01)
    elif trouble == "impossible":
        raise UsageError("width=8: must be a multiple of 3")
    return build()


def whole(width: int = 4):
    """One step of a loop of one's own."""
    module = nn.Linear(width, width)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step():
        loss = module(torch.ones(2, width)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Hungry(nn.Module):
    """Keeps 8 MiB an item for its backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x.expand(-1, 2 << 20) * self.weight).square().mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class HungryConfig:
    batch: int = knob(1, "items")


class HungryWhenTraced(Hungry):
    """Takes a gigabyte more under a profiler, as a profiler itself may."""

    def forward(self, x):
        if torch.autograd._profiler_enabled():
            torch.empty(1 << 30, dtype=torch.uint8)
        return super().forward(x)


def build_hungry(config):
    proofs = (ran("eager", "aten::pow"),)
    return Built(module=HungryWhenTraced(), batch=lambda: {"x": torch.ones(config.batch, 1)}, proofs=proofs)


HUNGRY = Workload(name="hungry", about="8 MiB an item", config=HungryConfig, presets={"one": {}}, build=build_hungry)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    variant: Literal["plain", "same", "wrong", "wrong_gradient", "nan", "lying"] = knob("plain", "how it is computed")
    width: int = knob(8, "width")
    batch: int = knob(4, "rows")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = nn.Linear(config.width, config.width)

    def forward(self, x, targets=None):
        variant = self.config.variant
        y = torch.addmm(self.layer.bias, x, self.layer.weight.T) if variant == "same" else self.layer(x)
        y = y * {"wrong": 1.01, "nan": float("nan")}.get(variant, 1.0)
        y = Doubled.apply(y) if variant == "wrong_gradient" else y
        return y if targets is None else (y - targets).square().mean()


def build_gated(config):
    def batch():
        shape = (config.batch, config.width)
        return {"x": torch.randn(shape), "targets": torch.randn(shape)}

    proof = ran("variant=lying", "aten::_fft_r2c") if config.variant == "lying" else ran("variant", "aten::addmm")
    return Built(
        module=Layer(config),
        batch=batch,
        num_tokens=config.batch,
        forward_flops=2 * config.batch * config.width**2,
        proofs=(proof,),
        facts=lambda: {"density": 0.5},
    )


GATED = Workload(
    name="gated",
    about="one layer, in right and wrong variants",
    config=Config,
    presets={"small": {}, "wide": {"width": 16}},
    build=build_gated,
    reference={"variant": "plain"},
    gate={"width": 4, "batch": 3},
)
