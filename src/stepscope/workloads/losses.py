"""Next-token cross entropy from hidden states and the head's weight, in three equivalent ways.

`full` keeps all logits. `chunked` keeps the logits of one chunk of rows and recomputes them in the backward pass,
four matmuls in total. `fused` computes the gradients while a chunk's logits exist, so the backward pass only scales
them: three matmuls, like `full`.

With p = softmax(h Wᵀ) and T rows, ∂loss/∂logits = (p − onehot(target)) ÷ T. The factor 1 ÷ T is applied in the
backward pass, so that what is rounded to the matmul dtype lies in [−1, 1].

Both are custom ops: the compiler sees one node without a graph break, and a trace shows each by name.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from stepscope.workloads.workload import Proof, ran, wrote

Loss = Literal["full", "chunked", "fused"]
CHUNK_ROWS = 1024
"""Rows of logits in memory at once: 206 MB in float32 for a vocabulary of 50,257; still fills a large GPU."""

CHUNKED_OP = "stepscope::chunked_cross_entropy"
FUSED_OP = "stepscope::fused_cross_entropy"


def next_token_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss: Loss = "full", chunk_rows: int = CHUNK_ROWS
) -> Tensor:
    """Return the mean cross entropy of hidden [rows, width] × weight [vocab, width]ᵀ and targets [rows].

    >>> _ = torch.manual_seed(0)
    >>> hidden, weight, targets = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    >>> full, fused = (next_token_loss(hidden, weight, targets, loss, chunk_rows=4) for loss in ("full", "fused"))
    >>> bool(torch.isclose(full, fused))
    True
    """
    if loss == "full":
        logits = functional.linear(hidden, weight)
        return functional.cross_entropy(logits.to(_wide(logits.dtype)), targets)
    product_dtype = _product_dtype(hidden)
    if loss == "chunked":
        total: Tensor = _chunked(hidden, weight, targets, chunk_rows, product_dtype)
    else:
        differentiated = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        total = _fused(hidden, weight, targets, chunk_rows, product_dtype, differentiated)[0]
    return total / targets.numel()


def loss_proof(claim: str, loss: str) -> Proof:
    """Return proof that this implementation of the loss ran."""
    if loss in ("chunked", "fused"):
        return ran(claim, CHUNKED_OP if loss == "chunked" else FUSED_OP)
    names = ("cross_entropy", "cross_entropy_loss", "log_softmax")
    return wrote(claim, *names, without=(CHUNKED_OP, FUSED_OP))


def _wide(dtype: torch.dtype) -> Any:
    return torch.promote_types(dtype, torch.float32)


def _product_dtype(hidden: Tensor) -> Any:
    """Return the dtype that autocast would use for a matmul of the hidden states; float64 stays float64."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _rows(num_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, start + chunk_rows) for start in range(0, num_rows, chunk_rows)]


def _chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of one chunk; its logits are freed here."""
    log_p = functional.log_softmax(hidden @ weight.t(), dim=-1, dtype=_wide(weight.dtype))
    return -log_p.gather(1, targets[:, None]).sum()


def _chunk_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, grad_hidden: Tensor, grad_weight: Tensor
) -> Tensor:
    """Return the summed loss of one chunk, write `grad_hidden` and add to `grad_weight`."""
    logits = hidden @ weight.t()
    log_p = functional.log_softmax(logits, dim=-1, dtype=_wide(weight.dtype))
    log_p_target = log_p.gather(1, targets[:, None])
    # The target's entry is computed separately: p − 1 of a rounded p would be 0 for a confident prediction.
    grad_logits = torch.exp(log_p, out=logits)
    grad_logits.scatter_(1, targets[:, None], torch.expm1(log_p_target).to(logits.dtype))
    del log_p
    grad_hidden.copy_(grad_logits @ weight)
    if grad_weight.dtype == weight.dtype:
        grad_weight.addmm_(grad_logits.t(), hidden)
    else:
        grad_weight += grad_logits.t() @ hidden
    return -log_p_target.sum()


def _total_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, product_dtype: torch.dtype
) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        total = hidden.new_zeros((), dtype=_wide(product_dtype))
        narrow = weight.to(product_dtype)
        for rows in _rows(len(hidden), chunk_rows):
            total += _chunk_loss(hidden[rows].to(product_dtype), narrow, targets[rows])
    return total


def _total_loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
    gradients: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss, the gradient of hidden in its dtype, and that of weight in float32 or wider."""
    if not gradients:
        total = _total_loss(hidden, weight, targets, chunk_rows, product_dtype)
        return total, hidden.new_empty(0), hidden.new_empty(0)
    wide = _wide(product_dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        total = hidden.new_zeros((), dtype=wide)
        grad_hidden = hidden.new_empty(hidden.shape)
        grad_weight = weight.new_zeros(weight.shape, dtype=wide)
        narrow = weight.to(product_dtype)
        for rows in _rows(len(hidden), chunk_rows):
            chunk = hidden[rows].to(product_dtype)
            total += _chunk_gradients(chunk, narrow, targets[rows], grad_hidden[rows], grad_weight)
    return total, grad_hidden, grad_weight


def _gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, product_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _total_loss_and_gradients(hidden, weight, targets, chunk_rows, product_dtype)[1:]


def _scaled(grad: Tensor, gradients: tuple[Tensor, Tensor], weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    grad_hidden, grad_weight = gradients
    return grad_hidden * grad, (grad_weight * grad).to(weight_dtype)


def _chunked_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _chunked_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, targets = ctx.saved_tensors
    return *_scaled(grad, _chunked_gradients(hidden, weight, targets, *ctx.options), weight.dtype), None, None, None


def _fused_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Otherwise the gradients of the two gradients arrive as full-size zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.weight_dtype = inputs[1].dtype


def _fused_grad(ctx: Any, grad: Tensor | None, *second: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(tensor is not None for tensor in second):
        raise RuntimeError("The fused loss has no second derivative. Use loss=full.")
    if grad is None:
        return (None,) * 6
    return *_scaled(grad, ctx.saved_tensors, ctx.weight_dtype), None, None, None, None


def _fake(hidden: Tensor, weight: Tensor, dtype: torch.dtype, gradients: bool = True) -> tuple[Tensor, ...]:
    """Return empty tensors shaped like the loss and both gradients."""
    total = hidden.new_empty((), dtype=_wide(dtype))
    if not gradients:
        return total, hidden.new_empty(0), hidden.new_empty(0)
    return total, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=_wide(dtype))


_ARGUMENTS = "Tensor hidden, Tensor weight, Tensor targets, int chunk_rows, ScalarType product_dtype"


def _op(name: str, function: Any, schema: str, fake: Any) -> Any:
    op = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
    op.register_fake(fake)
    return op


_chunked = _op(
    CHUNKED_OP,
    _total_loss,
    f"({_ARGUMENTS}) -> Tensor",
    lambda hidden, weight, targets, rows, dtype: _fake(hidden, weight, dtype)[0],
)
_chunked_gradients = _op(
    f"{CHUNKED_OP}_backward",
    _gradients,
    f"({_ARGUMENTS}) -> (Tensor, Tensor)",
    lambda hidden, weight, targets, rows, dtype: _fake(hidden, weight, dtype)[1:],
)
_fused = _op(
    FUSED_OP,
    _total_loss_and_gradients,
    f"({_ARGUMENTS}, bool gradients) -> (Tensor, Tensor, Tensor)",
    lambda hidden, weight, targets, rows, dtype, gradients: _fake(hidden, weight, dtype, gradients),
)
_chunked.register_autograd(_chunked_grad, setup_context=_chunked_context)
_fused.register_autograd(_fused_grad, setup_context=_fused_context)


def _head_flops(hidden: tuple[int, int], weight: tuple[int, int]) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0]


# The FLOP counter sees the op, not the matmuls inside it.
register_flop_formula(torch.ops.stepscope.chunked_cross_entropy)(
    lambda hidden, weight, *_, **__: _head_flops(hidden, weight)
)
register_flop_formula(torch.ops.stepscope.chunked_cross_entropy_backward)(
    lambda hidden, weight, *_, **__: 3 * _head_flops(hidden, weight)
)
register_flop_formula(torch.ops.stepscope.fused_cross_entropy)(
    lambda hidden, weight, targets, rows, dtype, gradients, **__: (
        (3 if gradients else 1) * _head_flops(hidden, weight)
    )
)
