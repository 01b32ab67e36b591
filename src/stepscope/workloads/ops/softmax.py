"""Softmax over the last dimension: handwritten, torch's own, or handwritten and compiled."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stepscope.workloads.ops.random_inputs import Function, built_over_rows
from stepscope.workloads.workload import Built, Workload, knob, ran, wrote


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxConfig:
    """x [batch, seq_len, width] → the same shape, every row of `width` summing to 1."""

    batch: int = knob(8, "sequences per batch")
    seq_len: int = knob(2048, "rows per sequence")
    width: int = knob(2048, "elements per row; a row too large for registers is read twice")
    implementation: Literal["handwritten", "torch", "compiled"] = knob(
        "handwritten", "handwritten: five ops through memory; torch: one kernel; compiled: the five fused"
    )


def handwritten_softmax(x: Tensor) -> Tensor:
    """Return e^(x − max) ÷ Σ e^(x − max) over the last dimension, op by op.

    Autograd keeps two tensors of x's size besides the result: x, in which the backward pass of `amax` searches its
    maxima again, and the exponentials. torch.softmax keeps only the result.
    """
    exponentials = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


PROOFS = {
    "handwritten": wrote(
        "implementation=handwritten", "amax", unless_written=("softmax",), note=", no fused softmax"
    ),
    "torch": wrote("implementation=torch", "softmax"),
    "compiled": ran("implementation=compiled", "Torch-Compiled Region"),
}


def build(config: SoftmaxConfig) -> Built:
    softmax = partial(torch.softmax, dim=-1) if config.implementation == "torch" else handwritten_softmax
    if config.implementation == "compiled":
        softmax = torch.compile(handwritten_softmax, dynamic=False)
    return built_over_rows(Function(softmax), config, PROOFS[config.implementation])


WORKLOAD = Workload(
    name="softmax",
    about="softmax of rows: handwritten, torch's kernel, or compiled",
    config=SoftmaxConfig,
    presets={"default": {}, "tiny": {"batch": 2, "seq_len": 16, "width": 64}},
    build=build,
    mode="forward+backward",
    reference={"implementation": "handwritten"},
    gate={"batch": 2, "seq_len": 16, "width": 128},
)
