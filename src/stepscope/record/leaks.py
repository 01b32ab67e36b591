"""Graphs of earlier steps that are still alive, with their bytes and the variable that holds them."""

from __future__ import annotations

import gc
import sys
import time
import types
from collections import deque
from collections.abc import Iterable, Iterator
from inspect import CO_OPTIMIZED
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from stepscope.record.frames import place, script_frames
from stepscope.record.nodes import saved_tensors
from stepscope.record.storages import storage_key, storage_of

# What looking for the graphs, and then for the variables, may take.
TIME_LIMIT_S = 2.0
MAX_DEPTH = 4
"""How far below a variable: `trainer.history["loss"][7]` is three."""

MAX_ELEMENTS = 100_000
"""Of one container: a data set held in a list is not walked through."""

_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType)


class LeftAlive(NamedTuple):
    """One entry for each variable that holds graphs, and whether the search ended before it was through."""

    entries: list[dict[str, Any]]
    is_complete: bool


def find_left_alive(step_began: int, keep: Iterable[torch.Tensor]) -> LeftAlive:
    """The graphs made before this moment that are still alive; `keep` are parameters and buffers, not counted.

    `step_began` is the sequence number with which the step that has just ended began. What an earlier step left
    behind counts, and what hangs on to it. Of the last step's own tensors only those count that keep more than
    themselves: `loss` in its variable is no leak once its backward has been run.
    """
    deadline = time.perf_counter() + TIME_LIMIT_S
    counted = {storage_key(tensor) for tensor in keep} | {None}
    found: dict[int, tuple[torch.Tensor, int]] = {}
    seen: dict[int, Any] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _tensors_with_graph():
            num_seen, num_bytes = len(seen), 0
            own_key, is_own_counted = storage_key(tensor), storage_key(tensor) in counted
            counted.add(own_key)
            for _, saved in saved_tensors([tensor.grad_fn], seen):
                key = storage_key(saved)
                if key not in counted:
                    counted.add(key)
                    num_bytes += storage_of(saved).nbytes()
                if time.perf_counter() > deadline:
                    break
            made = [tensor.grad_fn, *islice(seen.values(), num_seen, None)]
            if not is_own_counted and any(node._sequence_nr() < step_began for node in made):
                num_bytes += storage_of(tensor).nbytes()
            if num_bytes:
                found[id(tensor)] = (tensor, num_bytes)
            if time.perf_counter() > deadline:
                break
    is_complete = time.perf_counter() < deadline
    entries = _by_holder(found, time.perf_counter() + TIME_LIMIT_S) if found else []
    return LeftAlive(entries, is_complete)


def _tensors_with_graph() -> list[torch.Tensor]:
    # `type(o)` and not isinstance: proxies answer isinstance by running their own code. Fake tensors have no memory.
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and type(o).__name__ != "FakeTensor"]
    with_graph = [tensor for tensor in tensors if tensor.grad_fn is not None]
    return sorted(with_graph, key=lambda tensor: -tensor.grad_fn._sequence_nr())


def _by_holder(found: dict[int, tuple[torch.Tensor, int]], deadline: float) -> list[dict[str, Any]]:
    holders: dict[str | None, list[int]] = {}
    missing = set(found)
    for variable, value in _reachable(deadline):
        if id(value) in missing:
            missing.remove(id(value))
            holders.setdefault(variable, []).append(id(value))
            if not missing:
                break
    if missing:
        holders[None] = list(missing)
    entries = []
    for frame, ids in holders.items():
        tensor, _ = max((found[key] for key in ids), key=lambda entry: entry[1])
        entries.append(
            {
                "bytes": sum(found[key][1] for key in ids),
                "num_tensors": len(ids),
                "op": tensor.grad_fn.name() if tensor.grad_fn is not None else None,
                "module": None,  # made before anybody looked
                "frame": frame,
            }
        )
    return sorted(entries, key=lambda entry: -entry["bytes"])


def _reachable(deadline: float) -> Iterator[tuple[str, Any]]:
    """("train.py:31 losses", tensor) of the tensors that the script's variables reach, the nearest first."""
    level = list(_variables())
    seen: set[int] = set()
    for _ in range(MAX_DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if issubclass(type(value), torch.Tensor):
                yield name, value
            elif id(value) not in seen and not issubclass(type(value), _PLAIN):
                seen.add(id(value))
                below.extend(_parts(name, value))
            if time.perf_counter() > deadline:
                return
        level = below


def _variables() -> Iterator[tuple[str, Any]]:
    """("train.py:31 losses", value) of the locals and globals of every frame of the script."""
    globals_seen: set[int] = set()
    for frame in script_frames():
        if frame.f_code.co_flags & CO_OPTIMIZED:
            values = frame.f_locals
            yield from [(f"{place(frame)} {name}", value) for name, value in values.items()]
            # Before Python 3.13 this is a copy that stays with the frame and would keep what it names alive.
            if sys.version_info < (3, 13) and sys.getrefcount(values) <= 3:  # not a dict that locals() gave away
                values.clear()
            del values
        elif id(frame.f_globals) not in globals_seen:
            globals_seen.add(id(frame.f_globals))
            yield from [(f"{place(frame)} {name}", value) for name, value in frame.f_globals.items()]
    for frame in script_frames():
        if id(frame.f_globals) not in globals_seen:
            globals_seen.add(id(frame.f_globals))
            file = Path(frame.f_code.co_filename).name
            yield from [(f"{file} {name}", value) for name, value in list(frame.f_globals.items())]


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of: elements have their container's name, attributes add their own."""
    # By the built-in type's own methods: a subclass may answer with code of its own.
    if issubclass(type(value), dict):
        yield from [(name, item) for item in islice(dict.values(value), MAX_ELEMENTS)]
        return
    for container in _CONTAINERS:
        if issubclass(type(value), container):
            yield from [(name, item) for item in islice(container.__iter__(value), MAX_ELEMENTS)]
            return
    try:
        attributes = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        return
    if issubclass(type(value), nn.Module):
        attributes |= attributes.get("_modules") or {}
    yield from [(f"{name}.{attribute}", item) for attribute, item in attributes.items()]
