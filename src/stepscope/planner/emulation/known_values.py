"""Keeps values of planned tensors that follow from sizes and numbers alone.

A program may read positions, position masks, a rate schedule, or a host generator's output. A value is a real tensor,
and a view of a planned tensor gets a view of its value, so that writes are shared. If something unknown is written,
the storage is marked, and no tensor of it has a value any more.
"""

from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.planner.emulation.ops import Kind
from stepscope.planner.emulation.planned_tensor import CPU, PlannedTensor, value_of
from stepscope.recorder.ledger.storages import storage_of
from stepscope.recorder.values import tensors_in

MOST_INTEGERS, MOST_FLOATS = 1 << 20, 1 << 12  # larger tensors keep no value


def keep(out: Any, func: Any, kind: Kind, args: Any, kwargs: Any, is_host: bool) -> None:
    """Set the values of an op's outputs (a planned tensor, or a list or tuple) if its inputs' values are known.

    If something unknown is written, forget the values instead.
    """
    known = _inputs(out, kind, args, kwargs, is_host)
    real = None
    if known is not None:
        with suppress(RuntimeError):  # the host may have no kernel for this dtype
            real = run(func, kind, known, kwargs)
    if real is not None:
        give(out, real)
    elif kind.written:
        forget(kind, args, kwargs)


def give(out: Any, real: Any) -> None:
    """Set the values of a planned tensor, or of a list or tuple."""
    if isinstance(out, list | tuple):
        for tensor, value in zip(out, real):
            give(tensor, value)
    else:
        out._stepscope_value = real


def run(func: Any, kind: Kind, known: list[Any], kwargs: Any) -> Any:
    """Return the result of an op on the values of its arguments."""
    options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if kind.device_at is not None and kind.device_at >= len(known):
        options["device"] = CPU
    with _disable_current_modes():
        return func(*known, **options)


def forget(kind: Kind, args: Any, kwargs: Any) -> None:
    """Mark the values of all storages that an op writes as unknown."""
    for position, name in kind.written:
        for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name)):
            if type(tensor) is PlannedTensor:
                tensor._stepscope_inner.untyped_storage()._stepscope_is_unknown = True


def known_values(args: Any) -> list[Any] | None:
    """Return the arguments with planned tensors replaced by their values, or None if one has none."""
    found: list[Any] = []
    for value in args:
        if type(value) is PlannedTensor:
            value = value_of(value)
            if value is None:
                return None
        elif isinstance(value, list | tuple):
            inside = known_values(value)
            if inside is None:
                return None
            value = type(value)(inside)
        elif isinstance(value, torch.device):
            value = CPU
        found.append(value)
    return found


def _inputs(out: Any, kind: Kind, args: Any, kwargs: Any, is_host: bool) -> list[Any] | None:
    """Return what to compute the values of an op's outputs from, or None if unknown or too large."""
    if not kind.keeps_values or (kind.is_random and not is_host):
        return None
    parts = out if isinstance(out, list | tuple) else (out,)
    if not parts or not all(type(part) is PlannedTensor and is_small(part) for part in parts):
        return None
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return None
    if kind.overwrites and storage_of(out).nbytes() == out.numel() * out.element_size():
        rest = known_values(args[1:])
        if rest is None:
            return None
        # Written into the old value, which views share, or into a new one.
        out._stepscope_inner.untyped_storage()._stepscope_is_unknown = False
        value = out._stepscope_value
        if value is None:
            with _disable_current_modes():
                value = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=CPU)
        return [value, *rest]
    return known_values(args)


def is_small(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of this size keeps its values."""
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return bool(tensor.numel() <= (MOST_FLOATS if is_float else MOST_INTEGERS))
