"""Layers that more than one family is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    """x ÷ root-mean-square(x) × weight, computed in float32 or wider and returned in x's dtype."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rope_tables(length: int, head_width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_width ÷ 2] of rotary embedding, float32 (float64 for float64 inputs)."""
    cos, sin = _rope_tables(length, head_width, base, torch.promote_types(like.dtype, torch.float32), like.device)
    return cos, sin


def _make_tables(
    length: int, head_width: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, head_width, 2, device=device, dtype=dtype) / head_width
    angles = torch.arange(length, device=device, dtype=dtype)[:, None] * base**-half
    return angles.cos(), angles.sin()


def _fake_tables(
    length: int, head_width: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    cos = torch.empty(length, head_width // 2, dtype=dtype, device=device)
    return cos, torch.empty_like(cos)


# One op to the compiler. Seen as arithmetic it is fused into every use, and a power, a cosine and a sine for each
# element of queries and keys took 17 % of a compiled step of tsmoe.
_rope_tables = torch.library.custom_op(
    "stepscope::rope_tables",
    _make_tables,
    mutates_args=(),
    schema="(int length, int head_width, float base, ScalarType dtype, Device device) -> (Tensor, Tensor)",
)
_rope_tables.register_fake(_fake_tables)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., length, head_width] with each pair (first half, second half) turned by its position's angle."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, *more: Any, checkpoint_every: int) -> Tensor:
    """x through the blocks; with `checkpoint_every` k > 0, every k-th block is recomputed in the backward pass."""
    for index, block in enumerate(blocks):
        if checkpoint_every and index % checkpoint_every == 0 and torch.is_grad_enabled():
            x = checkpoint(block, x, *more, use_reentrant=False)
        else:
            x = block(x, *more)
    return x
