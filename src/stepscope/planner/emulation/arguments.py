"""What an op is given and what it gives: ghosts are opened before it runs on `meta`, and its outputs are wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Parameter

from stepscope.planner.emulation.planned_tensor import META, Ghost

PLANNED, HOSTED, NUMBER, REAL = 1, 2, 4, 8
"""What is among the arguments of an op: ghosts of the planned device, of the host, of the host without dimensions;
tensors with data."""
GHOSTS = PLANNED | HOSTED | NUMBER


def opened(arguments: Any, planned: torch.device) -> tuple[list[Any], int]:
    """The arguments with meta tensors for ghosts, and what there is among them."""
    inner: list[Any] = []
    seen = 0
    for value in arguments:
        kind = type(value)
        if kind is Ghost:
            inner.append(value._stepscope_inner)
            if value._stepscope_device is planned:
                seen |= PLANNED
            else:
                seen |= HOSTED if value.dim() else NUMBER
        elif kind is list or kind is tuple:
            parts, more = opened(value, planned)
            inner.append(parts if kind is list else tuple(parts))
            seen |= more
        else:
            inner.append(value)
            if (kind is torch.Tensor or kind is Parameter) and value.dim():
                seen |= REAL
    return inner, seen


def wrapped(out: Any, device: torch.device, outer: tuple[Any, ...], inner: tuple[Any, ...]) -> Any:
    """The outputs with ghosts for meta tensors; an input that is given back is the ghost that it was."""
    if isinstance(out, torch.Tensor):
        for ghost, tensor in zip(outer, inner):
            if tensor is out:
                return ghost
        return Ghost(out, device) if out.is_meta else out
    if isinstance(out, tuple | list):
        return type(out)([wrapped(part, device, outer, inner) for part in out])
    return out


def meta_like(value: Any) -> Any:
    """Meta tensors with the shapes of others."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, list | tuple):
        return type(value)([meta_like(part) for part in value])
    return value


def has_weight(args: Any) -> bool:
    """Whether a tensor with data is among the arguments that is to get a gradient."""
    return any(tensor.requires_grad for tensor in tensors_in(args) if not tensor.is_meta)


def without_data(value: Any) -> Any:
    """The arguments of an op with meta tensors for those that have data, and dimensions."""
    if isinstance(value, torch.Tensor):
        return meta_like(value) if value.dim() and not value.is_meta else value
    if isinstance(value, dict):
        return {name: without_data(part) for name, part in value.items()}
    return type(value)([without_data(part) for part in value]) if isinstance(value, list | tuple) else value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument, or in several."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
