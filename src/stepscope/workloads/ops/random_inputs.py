"""The workload of an op over random inputs."""

from collections.abc import Callable, Mapping
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


def built_over(
    module: nn.Module, config: Any, shapes: Mapping[str, tuple[int, ...]], *proofs: Proof, **more: Any
) -> Built:
    """Return the workload of a module over normally distributed inputs; `more` are further fields of Built."""
    return Built(
        module=module,
        batch=lambda: {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()},
        num_tokens=config.batch * config.seq_len,
        proofs=proofs,
        **more,
    )


def built_over_rows(module: nn.Module, config: Any, *proofs: Proof, **more: Any) -> Built:
    """Return the same over rows x [batch, seq_len, width]."""
    return built_over(module, config, {"x": (config.batch, config.seq_len, config.width)}, *proofs, **more)
