"""GELU in two ways: torch's, and one custom kernel each for forward and backward that the compiler does not touch.

Compiled, torch's GELU is limited by the instructions of the error function, and the backward pass recomputes it to
save memory. `kept` is a custom op: its output is kept for the backward pass of the next matmul, and its kernels run
at memory bandwidth (gelu_triton.py).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.workloads.workload import HAS_TRITON, Evidence, Proof

Gelu = Literal["torch", "kept"]


def gelu_by(way: Gelu, x: Tensor) -> Tensor:
    """Return GELU of x, computed this way in both directions."""
    y: Tensor = kept_gelu(x) if way == "kept" else functional.gelu(x)
    return y


def _is_fused(x: Tensor) -> bool:
    # The polynomial is only as precise as float32.
    return x.is_cuda and HAS_TRITON and x.dtype is not torch.float64


def _run(x: Tensor) -> Tensor:
    if not _is_fused(x):
        return functional.gelu(x)
    from stepscope.workloads import gelu_triton

    return gelu_triton.forward(x)


def _run_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    if not _is_fused(x):
        plain: Tensor = torch.ops.aten.gelu_backward(grad_y, x)
        return plain
    from stepscope.workloads import gelu_triton

    return gelu_triton.backward(grad_y, x)


kept_gelu = torch.library.custom_op("stepscope::gelu", _run, mutates_args=(), schema="(Tensor x) -> Tensor")
kept_gelu_backward = torch.library.custom_op(
    "stepscope::gelu_backward", _run_backward, mutates_args=(), schema="(Tensor grad_y, Tensor x) -> Tensor"
)


def _save_input(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad_y: Tensor) -> Tensor:
    gradient: Tensor = kept_gelu_backward(grad_y, *ctx.saved_tensors)
    return gradient


kept_gelu.register_fake(lambda x: x.new_empty(x.shape))
kept_gelu_backward.register_fake(lambda grad_y, x: x.new_empty(x.shape))
kept_gelu.register_autograd(_gradient, setup_context=_save_input)


def proofs(way: Gelu, num_calls: int) -> tuple[Proof, ...]:
    """Return the proofs of `kept`: the op ran, and on a GPU its kernel."""

    def shows(evidence: Evidence) -> str | None:
        on_gpu = evidence.device == "cuda" and HAS_TRITON
        calls = evidence.calls("stepscope_gelu_forward" if on_gpu else "stepscope::gelu")
        return f"stepscope::gelu ×{calls}" if calls >= max(1, num_calls) else None

    return () if way == "torch" else (Proof(claim=f"gelu={way}", shows=shows),)
