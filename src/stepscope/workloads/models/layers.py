"""Layers and batches shared by several model families."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepscope.workloads.custom_op import custom_op
from stepscope.workloads.workload import CAPTURED, Batch, Built, Evidence, Proof, Value, wrote

ROPE_BASE = 10_000.0


def sizes(names: str, *values: int) -> dict[str, Value]:
    """Return the knobs of a preset: the first of these names, separated by spaces, with their values."""
    return dict(zip(names.split(), values))


class RMSNorm(nn.Module):
    """x ÷ root mean square(x) × weight, computed in float32 or wider and returned in x's dtype."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rope_tables(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, head_width ÷ 2] for RoPE, float32 (float64 for float64 inputs)."""
    cos, sin = _rope_tables(length, head_width, torch.promote_types(like.dtype, torch.float32), like.device)
    return cos, sin


def _make_tables(length: int, head_width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, head_width, 2, device=device, dtype=dtype) / head_width
    angles = torch.arange(length, device=device, dtype=dtype)[:, None] * ROPE_BASE**-half
    return angles.cos(), angles.sin()


# One op for the compiler. Otherwise it is fused into every use, and a power, a cosine and a sine for each element of
# queries and keys took 17 % of a compiled step of tsmoe.
_rope_tables = custom_op(
    "rope_tables(int length, int head_width, ScalarType dtype, Device device) -> (Tensor, Tensor)",
    _make_tables,
    lambda length, head_width, dtype, device: tuple(
        torch.empty(length, head_width // 2, dtype=dtype, device=device) for _ in range(2)
    ),
)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., length, head_width] with each pair (first half, second half) rotated by its position's angle."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, *more: Any, checkpoint_every: int) -> Tensor:
    """Run x through the blocks, recomputing every k-th block in the backward pass if `checkpoint_every` is k > 0."""
    for index, block in enumerate(blocks):
        if checkpoint_every and index % checkpoint_every == 0 and torch.is_grad_enabled():
            x = checkpoint(block, x, *more, use_reentrant=False)
        else:
            x = block(x, *more)
    return x


def language_model(module: nn.Module, config: Any, *proofs: Proof, **more: Any) -> Built:
    """Return the workload of a language model over random tokens, each with the next one as its target.

    `more` are further fields of Built.
    """

    def batch() -> Batch:
        tokens = torch.randint(config.vocab, (config.batch, config.seq_len + 1))
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    num_tokens = config.batch * config.seq_len
    return Built(module=module, batch=batch, num_tokens=num_tokens, proofs=proofs, **more)


def logits_or_loss(logits: Tensor, targets: Tensor | None) -> Tensor:
    """Return the logits, or with targets their mean cross entropy."""
    return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def num_masks(evidence: Evidence) -> int:
    """Return how many masks attention was given. Eager it converts each to numbers; captured, it is an argument."""
    made = sum(evidence.ops.get(f"aten::{name}", 0) for name in ("where", "masked_fill", "masked_fill_"))
    return max(made, evidence.ops.get(f"{CAPTURED}attn_mask", 0))


def attention_proof(attention: str, layers: int) -> Proof:
    """Return proof that every layer ran this attention: naive, builtin or sdpa."""
    own = {"naive": "amax", "builtin": "softmax", "sdpa": "scaled_dot_product_attention"}[attention]
    # The compiler may have replaced handwritten attention by torch's fused attention.
    without = () if attention == "sdpa" else ("scaled_dot_product",)
    return wrote(f"attention={attention}", own, at_least=layers, without=without)
