"""Batches of random rows, and the workload of an op that maps such a batch to one of the same shape."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from stepscope.workloads.workload import Batch, Built, Proof


class RowKnobs(Protocol):
    """The sizes of a batch [batch, seq_len, width]."""

    @property
    def batch(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def width(self) -> int: ...


def random_rows(batch: int, seq_len: int, width: int, name: str = "x") -> Batch:
    """Return normally distributed numbers [batch, seq_len, width] that require a gradient."""
    return {name: torch.randn(batch, seq_len, width).requires_grad_()}


def built_over_rows(
    module: nn.Module, config: RowKnobs, proof: Proof, *, name: str = "x", forward_flops: int | None = None
) -> Built:
    """Return the workload of a module over such a batch; `name` is the module's argument."""
    return Built(
        module=module,
        batch=lambda: random_rows(config.batch, config.seq_len, config.width, name),
        num_tokens=config.batch * config.seq_len,
        forward_flops=forward_flops,
        proofs=(proof,),
    )
