"""Plans `flex_attention` with the memory of the kernel that it compiles to, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

NOTE = "planned as the fused kernel that it compiles to; the kernel's scratch memory and FLOPs are not counted"


def patches(note: Callable[[str], None]) -> Iterator[Any]:
    """Yield patches of the op behind `flex_attention` that call `note` when it is used."""
    from torch.nn.attention import flex_attention

    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        note(NOTE)
        out, sums = _Attend.apply(query, key, value)
        return out, sums, torch.empty_like(sums)

    yield mock.patch.object(flex_attention, "flex_attention_hop", attend)
    # Skips its own call of torch.compile.
    yield mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, create=True)


class _Attend(torch.autograd.Function):  # type: ignore[misc]  # torch is not type checked here
    """Returns outputs of the right size, and keeps one float32 row sum per query for backward."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        out = torch.empty_like(query) if query.shape == value.shape else _rows(query, value.shape[-1], query.dtype)
        sums = _rows(query, None, torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _rows(query: torch.Tensor, width: int | None, dtype: torch.dtype) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], *(() if width is None else (width,))), dtype=dtype)
