"""The workload of an op over random rows [batch, seq_len, width]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.workloads.workload import Built, Proof


class Function(nn.Module):
    """A function of one tensor as a module without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def built_over_rows(module: nn.Module, config: Any, *proofs: Proof, forward_flops: int | None = None) -> Built:
    """Return the workload of a module over normally distributed rows, as many as the configuration's knobs say."""
    shape = (config.batch, config.seq_len, config.width)
    return Built(
        module=module,
        batch=lambda: {"x": torch.randn(shape).requires_grad_()},
        num_tokens=config.batch * config.seq_len,
        forward_flops=forward_flops,
        proofs=proofs,
    )
