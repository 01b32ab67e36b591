"""Next-token cross entropy from hidden states and the head's weight, in three equivalent ways.

`full` keeps all logits. `chunked` keeps the logits of one chunk of rows and recomputes them in the backward pass,
four matmuls in total. `fused` computes the gradients while a chunk's logits exist, so the backward pass only scales
them: three matmuls, like `full`.

With p = softmax(h Wᵀ) and T rows, ∂loss/∂logits = (p − onehot(target)) ÷ T. The factor 1 ÷ T is applied in the
backward pass, so that what is rounded to the matmul dtype lies in [−1, 1].

Both are custom ops: the compiler sees one node without a graph break, and a trace shows each by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from stepscope.errors import UsageError
from stepscope.workloads.custom_op import custom_op
from stepscope.workloads.workload import Batch, Built, Proof, Workload, knob, ran, wrote

Loss = Literal["full", "chunked", "fused"]
Pair = tuple[Tensor, Tensor]  # gradients of the hidden states and of the weight
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


def _chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor, gradients: Pair | None) -> Tensor:
    """Return the summed loss of one chunk; write its gradient of hidden, and add to that of weight, if asked for.

    The chunk's logits are freed here.
    """
    logits = hidden @ weight.t()
    log_p = functional.log_softmax(logits, dim=-1, dtype=_wide(weight.dtype))
    log_p_target = log_p.gather(1, targets[:, None])
    if gradients is not None:
        grad_hidden, grad_weight = gradients
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


def _loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_rows: int,
    product_dtype: torch.dtype,
    gradients: Pair | None = None,
) -> Tensor:
    """Return the summed loss and fill the gradients, if given, chunk by chunk."""
    with torch.autocast(hidden.device.type, enabled=False):
        total = hidden.new_zeros((), dtype=_wide(product_dtype))
        narrow = weight.to(product_dtype)
        for begin in range(0, len(hidden), chunk_rows):
            rows = slice(begin, begin + chunk_rows)
            wanted = None if gradients is None else (gradients[0][rows], gradients[1])
            total += _chunk_loss(hidden[rows].to(product_dtype), narrow, targets[rows], wanted)
    return total


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, product_dtype: torch.dtype, wanted: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and, if wanted, both gradients: of weight in float32 or wider."""
    if not wanted:
        total = _loss(hidden, weight, targets, chunk_rows, product_dtype)
        return total, hidden.new_empty(0), hidden.new_empty(0)
    gradients = hidden.new_empty(hidden.shape), weight.new_zeros(weight.shape, dtype=_wide(product_dtype))
    return _loss(hidden, weight, targets, chunk_rows, product_dtype, gradients), *gradients


def _fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, product_dtype: torch.dtype, wanted: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors shaped like the loss and both gradients."""
    total = hidden.new_empty((), dtype=_wide(product_dtype))
    if not wanted:
        return total, hidden.new_empty(0), hidden.new_empty(0)
    return total, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=_wide(product_dtype))


def _scaled(grad: Tensor, gradients: Pair, weight_dtype: torch.dtype) -> Pair:
    grad_hidden, grad_weight = gradients
    return grad_hidden * grad, (grad_weight * grad).to(weight_dtype)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _recompute(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, targets = ctx.saved_tensors
    return *_scaled(grad, _chunked_gradients(hidden, weight, targets, *ctx.options), weight.dtype), None, None, None


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Otherwise the gradients of the two gradients arrive as full-size zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.weight_dtype = inputs[1].dtype


def _scale_kept(ctx: Any, grad: Tensor | None, *second: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(tensor is not None for tensor in second):
        raise RuntimeError("The fused loss has no second derivative. Use loss=full.")
    if grad is None:
        return (None,) * 6
    return *_scaled(grad, ctx.saved_tensors, ctx.weight_dtype), None, None, None, None


_ARGUMENTS = "Tensor hidden, Tensor weight, Tensor targets, int chunk_rows, ScalarType product_dtype"
_chunked = custom_op(
    f"chunked_cross_entropy({_ARGUMENTS}) -> Tensor", _loss, lambda *given: _fake(*given)[0], _recompute, _keep_inputs
)
_chunked_gradients = custom_op(
    f"chunked_cross_entropy_backward({_ARGUMENTS}) -> (Tensor, Tensor)",
    lambda *given: _loss_and_gradients(*given)[1:],
    lambda *given: _fake(*given)[1:],
)
_fused = custom_op(
    f"fused_cross_entropy({_ARGUMENTS}, bool wanted) -> (Tensor, Tensor, Tensor)",
    _loss_and_gradients,
    _fake,
    _scale_kept,
    _keep_gradients,
)


def _count_products(op: Any, num_products: Callable[..., int]) -> None:
    """Tell the FLOP counter, which sees the op and not the matmuls inside it."""

    def flops(hidden: tuple[int, int], weight: tuple[int, int], *rest: Any, **_: Any) -> int:
        return num_products(*rest) * 2 * hidden[0] * hidden[1] * weight[0]

    register_flop_formula(op)(flops)


_count_products(torch.ops.stepscope.chunked_cross_entropy, lambda *_: 1)
_count_products(torch.ops.stepscope.chunked_cross_entropy_backward, lambda *_: 3)
_count_products(torch.ops.stepscope.fused_cross_entropy, lambda targets, rows, dtype, wanted: 3 if wanted else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossEntropyConfig:
    tokens: int = knob(16384, "rows of hidden states")
    width: int = knob(768, "width of a hidden state")
    vocab: int = knob(50257, "vocabulary size; the logits are tokens × vocab")
    implementation: Literal["full", "torch", "chunked", "fused"] = knob(
        "full", "float32 logits; logits in the head's dtype; chunks, recomputed; chunks with fused gradients"
    )
    chunk_rows: int = knob(CHUNK_ROWS, "rows of logits in memory at once in a chunked or fused loss")


class CrossEntropy(nn.Module):
    """A linear head and the mean cross entropy of its logits."""

    def __init__(self, config: CrossEntropyConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.vocab, config.width) * config.width**-0.5)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss of hidden [tokens, width] and targets [tokens], or the logits without targets."""
        if targets is None:
            return functional.linear(hidden, self.weight)
        if self.config.implementation == "torch":
            return functional.cross_entropy(functional.linear(hidden, self.weight), targets)
        return next_token_loss(hidden, self.weight, targets, self.config.implementation, self.config.chunk_rows)


def build(config: CrossEntropyConfig) -> Built:
    if config.chunk_rows < 1:
        raise UsageError(f"chunk_rows={config.chunk_rows}: must be at least 1")

    def batch() -> Batch:
        hidden = torch.randn(config.tokens, config.width, requires_grad=True)
        return {"hidden": hidden, "targets": torch.randint(config.vocab, (config.tokens,))}

    return Built(
        module=CrossEntropy(config),
        batch=batch,
        num_tokens=config.tokens,
        forward_flops=2 * config.tokens * config.width * config.vocab,
        proofs=(loss_proof(f"implementation={config.implementation}", config.implementation),),
    )


WORKLOAD = Workload(
    name="cross_entropy",
    about="linear head and cross entropy: full logits, chunked, or fused with gradients; compares memory",
    config=CrossEntropyConfig,
    presets={"hydra": {"tokens": 16384, "width": 768}, "tiny": {"tokens": 96, "width": 32, "vocab": 500}},
    build=build,
    reference={"implementation": "full"},
    gate={"tokens": 96, "width": 32, "vocab": 500, "chunk_rows": 40},
)
