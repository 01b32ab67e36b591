"""Unwraps planned tensors in the arguments of an op, and wraps its outputs."""

from typing import Any

import torch
from torch.nn import Parameter

from stepscope.planner.emulation.planned_tensor import META, PlannedTensor

PLANNED, HOSTED, NUMBER, REAL = 1, 2, 4, 8
"""Flags for an op's arguments: planned tensors on the device, on the host, on the host without dimensions; and
tensors with data."""
DATALESS = PLANNED | HOSTED | NUMBER


def unwrapped(arguments: Any, planned: torch.device) -> tuple[list[Any], int]:
    """Return the arguments with planned tensors replaced by meta tensors, and flags for what they contain."""
    inner: list[Any] = []
    seen = 0
    for value in arguments:
        kind = type(value)
        if kind is PlannedTensor:
            inner.append(value._stepscope_inner)
            if value._stepscope_device is planned:
                seen |= PLANNED
            else:
                seen |= HOSTED if value.dim() else NUMBER
        elif kind is list or kind is tuple:
            parts, more = unwrapped(value, planned)
            inner.append(parts if kind is list else tuple(parts))
            seen |= more
        else:
            inner.append(value)
            if (kind is torch.Tensor or kind is Parameter) and value.dim():
                seen |= REAL
    return inner, seen


def wrapped(out: Any, device: torch.device, outer: tuple[Any, ...], inner: tuple[Any, ...]) -> Any:
    """Return the outputs with meta tensors wrapped. An input that is returned stays the same object."""
    if isinstance(out, torch.Tensor):
        for planned, tensor in zip(outer, inner):
            if tensor is out:
                return planned
        return PlannedTensor(out, device) if out.is_meta else out
    if isinstance(out, tuple | list):
        return type(out)([wrapped(part, device, outer, inner) for part in out])
    return out


def meta_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, list | tuple):
        return type(value)([meta_like(part) for part in value])
    return value


def without_data(value: Any) -> Any:
    """Return the arguments with meta tensors for those that have data and dimensions."""
    if isinstance(value, torch.Tensor):
        return meta_like(value) if value.dim() and not value.is_meta else value
    if isinstance(value, dict):
        return {name: without_data(part) for name, part in value.items()}
    return type(value)([without_data(part) for part in value]) if isinstance(value, list | tuple) else value
