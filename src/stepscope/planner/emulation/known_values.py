"""Values kept beside tensors that have none: those that follow from sizes and numbers alone.

A program may look at positions, masks of positions, a schedule of rates, or what a host's generator drew. A value is
a real tensor, and a view of a ghost has a view of the ghost's value, so that what is written to one is seen by all.
Where something unknown is written, the storage is marked, and no ghost of it has a value any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.planner.emulation.op_kinds import Kind
from stepscope.planner.emulation.planned_tensor import Ghost, value_of

CPU = torch.device("cpu")
MOST_WHOLE_NUMBERS = 1 << 20
MOST_FLOATS = 1 << 12
"""A tensor with more elements keeps no value."""


def keep(out: Any, func: Any, kind: Kind, args: Any, kwargs: Any, is_host: bool) -> None:
    """Give what follows from known values its own; forget what something unknown is written over.

    `out`: a ghost, or a list or tuple of them.
    """
    known = _inputs(out, kind, args, kwargs, is_host)
    real = None
    if known is not None:
        try:
            real = run(func, kind, known, kwargs)
        except (RuntimeError, NotImplementedError):  # a host has no kernel for this dtype
            real = None
    if real is None:
        if kind.written:
            forget(kind, args, kwargs)
    else:
        give(out, real)


def give(out: Any, real: Any) -> None:
    """Keep values beside ghosts: of one, or of a list or tuple of them."""
    if isinstance(out, list | tuple):
        for ghost, value in zip(out, real):
            give(ghost, value)
    else:
        out._stepscope_value = real


def run(func: Any, kind: Kind, known: list[Any], kwargs: Any) -> Any:
    """The op on the values of its arguments."""
    options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if kind.device_at is not None and kind.device_at >= len(known):
        options["device"] = CPU
    with _disable_current_modes():
        return func(*known, **options)


def forget(kind: Kind, args: Any, kwargs: Any) -> None:
    """No ghost of the storages that an op writes has a value any more."""
    for position, name in kind.written:
        for ghost in _ghosts(args[position] if position < len(args) else kwargs.get(name)):
            ghost._stepscope_inner.untyped_storage()._stepscope_is_unknown = True


def known_values(args: Any) -> list[Any] | None:
    """The arguments with the values of the ghosts among them; None where one has none."""
    found: list[Any] = []
    for value in args:
        if type(value) is Ghost:
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
    """What to compute the values of an op's outputs from; None where they have none, or too many."""
    if not kind.keeps_values or (kind.is_random and not is_host):
        return None
    parts = out if isinstance(out, list | tuple) else (out,)
    if not parts or not all(type(part) is Ghost and is_small(part) for part in parts):
        return None
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return None
    if kind.overwrites and _is_whole(out):
        rest = known_values(args[1:])
        return None if rest is None else [_cleared(out), *rest]
    return known_values(args)


def _is_whole(ghost: Any) -> bool:
    return bool(ghost._stepscope_inner.untyped_storage().nbytes() == ghost.numel() * ghost.element_size())


def _cleared(ghost: Any) -> torch.Tensor:
    """Something for a ghost's value to be written into: the value it had, which its views share, or a new one."""
    ghost._stepscope_inner.untyped_storage()._stepscope_is_unknown = False
    value: torch.Tensor | None = ghost._stepscope_value
    if value is None:
        with _disable_current_modes():
            value = torch.empty_strided(ghost.shape, ghost.stride(), dtype=ghost.dtype, device=CPU)
    return value


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this size keeps its values."""
    dtype = tensor.dtype
    return bool(
        tensor.numel() <= (MOST_FLOATS if dtype.is_floating_point or dtype.is_complex else MOST_WHOLE_NUMBERS)
    )


def _ghosts(value: Any) -> Iterator[Any]:
    if type(value) is Ghost:
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _ghosts(part)
