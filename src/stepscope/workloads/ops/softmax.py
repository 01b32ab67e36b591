"""Softmax over the last dimension: written out, torch's own, or written out and compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from stepscope.workloads.workload import Batch, Built, Evidence, Proof, Workload, knob, ran


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxConfig:
    """x [batch, seq_len, width] → the same shape, every row of `width` summing to 1."""

    batch: int = knob(8, "sequences in a batch")
    seq_len: int = knob(2048, "rows in a sequence")
    width: int = knob(2048, "numbers in a row; beyond what a kernel keeps in registers a row is read twice")
    implementation: Literal["handwritten", "torch", "compiled"] = knob(
        "handwritten",
        "handwritten: five ops, each a trip through memory; torch: one kernel; compiled: the five fused",
    )


def handwritten_softmax(x: Tensor) -> Tensor:
    """e^(x − max) ÷ Σ e^(x − max) over the last dimension, op by op.

    Autograd keeps two tensors of x's size beside the result: x itself, because `amax` finds its maxima again in the
    backward pass, and the exponentials. torch.softmax keeps the result alone.
    """
    exponentials = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


class Softmax(nn.Module):
    """The softmax of one implementation."""

    def __init__(self, config: SoftmaxConfig) -> None:
        super().__init__()
        self.implementation = config.implementation
        if config.implementation == "compiled":
            self.compiled = torch.compile(handwritten_softmax, dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.implementation == "torch":
            return torch.softmax(x, dim=-1)
        return self.compiled(x) if self.implementation == "compiled" else handwritten_softmax(x)


def _handwritten_ran(evidence: Evidence) -> str | None:
    calls = evidence.written("amax")
    return f"amax ×{calls}, no fused softmax" if calls and not evidence.written("softmax") else None


def _torch_ran(evidence: Evidence) -> str | None:
    calls = evidence.written("softmax")
    return f"softmax ×{calls}" if calls else None


PROOFS = {
    "handwritten": Proof(claim="implementation=handwritten", shows=_handwritten_ran),
    "torch": Proof(claim="implementation=torch", shows=_torch_ran),
    "compiled": ran("implementation=compiled", "Torch-Compiled Region"),
}


def build(config: SoftmaxConfig) -> Built:
    """The softmax and a batch of normal numbers that ask for a gradient."""

    def batch() -> Batch:
        return {"x": torch.randn(config.batch, config.seq_len, config.width).requires_grad_()}

    return Built(
        module=Softmax(config),
        batch=batch,
        num_tokens=config.batch * config.seq_len,
        proofs=(PROOFS[config.implementation],),
    )


WORKLOAD = Workload(
    name="softmax",
    about="softmax of rows: written out, torch's kernel, or compiled",
    config=SoftmaxConfig,
    presets={"default": {}, "tiny": {"batch": 2, "seq_len": 16, "width": 64}},
    build=build,
    mode="forward+backward",
    reference={"implementation": "handwritten"},
    gate={"batch": 2, "seq_len": 16, "width": 128},
)
