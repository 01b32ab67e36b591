"""GELU in two ways: torch's, and one custom kernel each for forward and backward that the compiler does not touch.

Compiled, torch's GELU is limited by the instructions of the error function, and the backward pass recomputes it to
save memory. `kept` is a custom op: its output is kept for the backward pass of the next matmul, and its kernels run
at memory bandwidth (gelu_triton.py).
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.workloads.custom_op import custom_op
from stepscope.workloads.workload import HAS_TRITON, Evidence, Proof

Gelu = Literal["torch", "kept"]


def gelu_by(way: Gelu, x: Tensor) -> Tensor:
    return kept_gelu(x) if way == "kept" else functional.gelu(x)


def _kernels(x: Tensor) -> Any:
    """Return the Triton kernels if they can run; their polynomial is only as precise as float32."""
    if not x.is_cuda or not HAS_TRITON or x.dtype is torch.float64:
        return None
    from stepscope.workloads import gelu_triton

    return gelu_triton


def _run(x: Tensor) -> Tensor:
    kernels = _kernels(x)
    return functional.gelu(x) if kernels is None else kernels.forward(x)


def _run_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    kernels = _kernels(x)
    return torch.ops.aten.gelu_backward(grad_y, x) if kernels is None else kernels.backward(grad_y, x)


kept_gelu_backward = custom_op(
    "gelu_backward(Tensor grad_y, Tensor x) -> Tensor", _run_backward, lambda grad_y, x: x.new_empty(x.shape)
)
kept_gelu = custom_op(
    "gelu(Tensor x) -> Tensor",
    _run,
    lambda x: x.new_empty(x.shape),
    lambda ctx, grad_y: kept_gelu_backward(grad_y, *ctx.saved_tensors),
)


def proofs(way: Gelu, num_calls: int) -> tuple[Proof, ...]:
    """Return the proofs of `kept`: the op ran, and on a GPU its kernel."""

    def shows(evidence: Evidence) -> str | None:
        on_gpu = evidence.device == "cuda" and HAS_TRITON
        calls = evidence.calls("stepscope_gelu_forward" if on_gpu else "stepscope::gelu")
        return f"stepscope::gelu ×{calls}" if calls >= max(1, num_calls) else None

    return () if way == "torch" else (Proof(claim=f"gelu={way}", shows=shows),)
