"""`flex_attention` in a plan: the memory of the kernel that it is compiled to, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

NOTE = "taken as the fused kernel that it is compiled to; what that takes inside, and the FLOPs, are not counted"


def patches(note: Callable[[str], None]) -> Iterator[Any]:
    """Patches of the op behind `flex_attention`; `note` is told what a plan must say when it is called."""
    from torch.nn.attention import flex_attention

    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        note(NOTE)
        out, sums = _Attend.apply(query, key, value)
        return out, sums, torch.empty_like(sums)

    yield mock.patch.object(flex_attention, "flex_attention_hop", attend)
    # Its own call of torch.compile, where a program has none.
    yield mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, create=True)


class _Attend(torch.autograd.Function):  # type: ignore[misc]  # torch is not type checked here
    """Outputs of the right size: one row sum in float32 for each query is kept for backward."""

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
