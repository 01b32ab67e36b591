"""The workload of an op over random rows [batch, seq_len, width]."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from stepscope.workloads.workload import Built, Proof


class RowKnobs(Protocol):
    """The sizes of a batch [batch, seq_len, width]."""

    @property
    def batch(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def width(self) -> int: ...


def built_over_rows(
    module: nn.Module, config: RowKnobs, *proofs: Proof, name: str = "x", forward_flops: int | None = None
) -> Built:
    """Return the workload of a module over normally distributed rows that require a gradient."""
    shape = (config.batch, config.seq_len, config.width)
    return Built(
        module=module,
        batch=lambda: {name: torch.randn(shape).requires_grad_()},
        num_tokens=config.batch * config.seq_len,
        forward_flops=forward_flops,
        proofs=proofs,
    )
