"""The gate's verdict: optimizers held against AdamW, and a tolerance that stays a number."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import pytest

torch = pytest.importorskip("torch")

from stepscope.sweep.checks import gate
from stepscope.workloads import optimizers
from stepscope.workloads.workload import Built, Workload, knob

RUN = {
    "mode": "step", "dtype": "fp32", "bf16_reduction": "auto", "compile": "off", "sdpa": "free",
    "optimizer": "adamw", "warmup": 1, "steps": 1, "seed": 0, "device": "cpu",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    variant: Literal["plain", "other"] = knob("plain", "which")
    scale: float = knob(1.0, "of the product")
    batch: int = knob(4, "rows")


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, targets=None):
        y = self.linear(x) * self.config.scale
        return y if targets is None else (y - targets).square().mean()


def build(config):
    return Built(module=Model(config), batch=lambda: {"x": torch.randn(4, 8), "targets": torch.randn(4, 8)})


WORKLOAD = Workload(
    name="w",
    about="",
    config=Config,
    presets={"default": {}},
    build=build,
    reference={"variant": "plain"},
    gate={"batch": 4},
)


def check(scale=1.0, **run):
    values = {"variant": "other", "scale": scale, "batch": 4}
    return gate.check(WORKLOAD, values, {**RUN, **run}, with_gradients=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast_bf16"])
@pytest.mark.parametrize("optimizer", ["fused", "handwritten"])
def test_optimizers_move_parameters_as_adamw_does(optimizer, dtype):
    verdict = check(optimizer=optimizer, dtype=dtype)

    assert verdict.passed and set(verdict.deviations) == {"outputs", "loss", "gradients", "updates"}
    if dtype != "bf16":  # whose weights round most of an update away, whoever makes it
        assert verdict.deviations["updates"] < 1e-4


@pytest.mark.parametrize("wrong", [{"betas": (0.9, 0.99)}, {"weight_decay": 0.0, "lr": 1.1e-3}, {"eps": 1e-2}])
def test_a_wrong_optimizer_is_wrong(monkeypatch, wrong):
    handwritten = optimizers.HandwrittenAdamW
    monkeypatch.setitem(optimizers.OPTIMIZERS, "handwritten", lambda parameters: handwritten(parameters, **wrong))

    verdict = check(optimizer="handwritten")

    assert not verdict.passed and "update of linear." in verdict.worst
    assert check(optimizer="handwritten", mode="forward+backward").passed


def test_a_reference_that_overflows_excuses_nothing():
    verdict = check(scale=1e30, dtype="autocast_fp16", mode="forward+backward")

    assert not verdict.passed and "autocast_fp16" in verdict.worst
    assert max(verdict.tolerances.values()) < 1


@pytest.mark.parametrize(
    ("mode", "taken"),
    [
        ("max-autotune", "reduce-overhead"),
        ("max-autotune-no-cudagraphs", None),
        ("reduce-overhead", "reduce-overhead"),
    ],
)
def test_the_gate_compiles_without_autotuning(monkeypatch, mode, taken):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda module, mode=None: modes.append(mode) or module)

    assert check(compile=mode).passed
    assert modes == [taken]  # the truth is never compiled


def test_points_that_differ_in_autotuning_share_a_verdict():
    from stepscope.sweep.grid import Point
    from stepscope.sweep.runner import Runner

    runner = Runner.__new__(Runner)
    runner._gate_sizes = WORKLOAD.gate

    def key(mode):
        run = {**RUN, "compile": mode}
        return runner._gate_key(Point(workload="w", preset=None, config={"batch": 4}, run=run, hash=mode))

    assert key("max-autotune") == key("reduce-overhead") != key("default") == key("max-autotune-no-cudagraphs")


def test_use_torch_ptxas_for_the_cache_of_triton(monkeypatch, tmp_path):
    from stepscope.sweep.prepare import use_torch_ptxas

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    use_torch_ptxas(tmp_path)
    assert "TRITON_PTXAS_PATH" not in os.environ  # this torch brings none along

    (tmp_path / "bin").mkdir()
    assembler = tmp_path / "bin" / "ptxas"
    assembler.write_text("")
    assembler.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "mine")
    use_torch_ptxas(tmp_path)
    assert os.environ["TRITON_PTXAS_PATH"] == "mine"

    monkeypatch.delenv("TRITON_PTXAS_PATH")
    use_torch_ptxas(tmp_path)
    assert os.environ["TRITON_PTXAS_PATH"] == str(assembler)
    monkeypatch.delenv("TRITON_PTXAS_PATH")
