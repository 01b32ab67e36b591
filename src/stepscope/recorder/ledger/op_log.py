"""The ops of one step in order: the line of the script behind each, and which storages it reads and writes."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property
from math import gcd
from typing import Any

import torch

from stepscope.recorder.frames import is_library, is_pythons, place, script_frames
from stepscope.recorder.ledger.flops import Op
from stepscope.recorder.ledger.nodes import current_node, next_sequence_number
from stepscope.recorder.ledger.storages import storage_key, storage_of
from stepscope.recorder.values import is_capturing, is_plain, tensors_in

MAX_CALLS = 100_000
FROM_OUTSIDE = -1  # a storage that no op made: what another library or process filled
_FILLS = ("aten.zero_", "aten.fill_", "aten.copy_", "aten._foreach_zero_", "aten._foreach_copy_")
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_LEAST_ELEMENTS = 1 << 14
_NUM_LOOKED_AT = 1 << 14  # elements of a matrix, to estimate its share of zeros
_MOSTLY = 0.9  # share of zeros that is noted
_OF_MODULES = ("forward", "__call__")  # functions that a module's call runs

Line = tuple["str | None", "str | None"]
"""The line of the script that called an op, and the one that called the model, if that is another."""


class OpLog:
    """Notes every op but views. `index_of` returns the number of a storage by its key, or None."""

    def __init__(self, index_of: Callable[[int], int | None]) -> None:
        self._index_of = index_of
        self._home = threading.get_ident()
        self._kinds: dict[tuple[str, str, Line, bool], int] = {}
        self._calls: list[dict[str, Any]] = []
        self._num_dropped = 0
        self._written: dict[Any, tuple[frozenset[int], frozenset[str]]] = {}
        self._operands: dict[int, list[tuple[int, _NonZeros]]] = {}  # of products, by call
        self._known: dict[int, _NonZeros | None] = {}  # by storage
        self._numbers: list[int] = []  # the next node's number after each op of the forward, with its place
        self._places: list[Line] = []
        self._names: dict[tuple[Any, int], str] = {}

    def note(self, func: Any, op: Op, args: Any, kwargs: Any, outputs: Iterable[torch.Tensor], phase: str) -> None:
        line = self._line()
        if op.is_view:
            return
        self._num_dropped += 1  # until it is noted
        if len(self._calls) >= MAX_CALLS:
            return
        changed = self._changed(func, args, kwargs)
        is_fill = op.name in _FILLS
        filled = {self._index(tensor) for tensor in changed if is_fill and _is_whole(tensor)}
        reads = {self._index(tensor) for tensor in tensors_in((args, kwargs))}
        if is_fill:  # what it copies may be a part of the same storage
            others = tensors_in((args[1:], kwargs))
            reads = reads - filled | {self._index(tensor) for tensor in others}
        writes = {self._index(tensor) for tensor in (*outputs, *changed)}
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        kind = self._kinds.setdefault((op.name, phase, line, is_random), len(self._kinds))
        if op.name in _PRODUCTS:
            found = [(self._index(tensor), self._nonzeros(tensor)) for tensor in tensors_in(args)]
            self._operands[len(self._calls)] = [(index, one) for index, one in found if one is not None]
        size = sum(tensor.numel() for tensor in tensors_in((args, kwargs)) if tensor.dim())
        self._calls.append({"kind": kind, "reads": sorted(reads), "writes": sorted(writes), "size": size})
        self._num_dropped -= 1

    def table(self, unchanged: Iterable[int]) -> dict[str, Any]:
        """Return the log for `memory.json.gz`; `unchanged` are storages that have been the same for many steps."""
        kinds = [
            {"op": op, "phase": phase, "place": line[0], "caller": line[1], "is_random": is_random}
            for op, phase, line, is_random in self._kinds
        ]
        return {
            "kinds": kinds,
            "calls": self._calls,
            "zeros": self._zeros(),
            "unchanged": sorted(unchanged),
            "num_dropped": self._num_dropped,
        }

    def _line(self) -> Line:
        """Return the lines of the script that called the running op; in a backward, the lines of its forward."""
        node = current_node()
        if node is not None and hasattr(node, "_sequence_nr"):
            number = int(node._sequence_nr())
            # On an autograd thread, a lower number may be one that a checkpointed forward made there.
            if threading.get_ident() == self._home or number >= next_sequence_number():
                position = bisect_right(self._numbers, number)
                if position < len(self._places):
                    return self._places[position]
        frames = [one for one in script_frames() if not is_pythons(one.f_code.co_filename)]
        if not frames:
            return None, None
        caller = None
        is_inside = False  # a module
        for frame in frames:
            is_named = frame.f_code.co_name in _OF_MODULES
            is_modules = is_named and isinstance(frame.f_locals.get("self"), torch.nn.Module)
            is_inside |= is_modules
            if is_inside and not is_modules and not is_library(frame.f_code.co_filename):
                caller = self._name(frame)
                break
        line = self._name(frames[0]), caller
        if node is None and threading.get_ident() == self._home:
            self._numbers.append(next_sequence_number())
            self._places.append(line)
        return line

    def _name(self, frame: Any) -> str:
        key = frame.f_code, frame.f_lineno
        if key not in self._names:
            self._names[key] = f"{place(frame)} {frame.f_code.co_name}"
        return self._names[key]

    def _index(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        index = None if key is None else self._index_of(key)
        return FROM_OUTSIDE if index is None else index

    def _changed(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the arguments that an op writes to."""
        found = self._written.get(func)
        if found is None:
            schema = getattr(func, "_schema", None)
            arguments = list(schema.arguments) if schema is not None else []
            is_written = [one.alias_info is not None and one.alias_info.is_write for one in arguments]
            names = frozenset(one.name for one, is_changed in zip(arguments, is_written) if is_changed)
            found = frozenset(number for number, is_changed in enumerate(is_written) if is_changed), names
            self._written[func] = found
        numbers, names = found
        values = [args[number] for number in sorted(numbers) if number < len(args)]
        return list(tensors_in([*values, *(value for name, value in kwargs.items() if name in names)]))

    def _nonzeros(self, tensor: torch.Tensor) -> _NonZeros | None:
        index = self._index(tensor)
        if index == FROM_OUTSIDE:
            return _nonzeros(tensor)
        if index not in self._known:
            self._known[index] = _nonzeros(tensor)
        return self._known[index]

    def _zeros(self) -> list[dict[str, Any]]:
        """Return the products with an operand that is mostly zeros, and its storage; waits for the device."""
        rows = []
        for call, operands in self._operands.items():
            share, index = max(((one.zero_share, index) for index, one in operands), default=(0.0, FROM_OUTSIDE))
            if share >= _MOSTLY:
                rows.append({"call": call, "share": round(share, 4), "storage": index})
        return rows


class _NonZeros:
    """How many of the elements looked at are not zero: read when it is asked for, not while the device works."""

    def __init__(self, looked_at: torch.Tensor) -> None:
        self._count, self._num = torch.count_nonzero(looked_at), looked_at.numel()

    @cached_property
    def zero_share(self) -> float:
        share: float = 1.0 - float(self._count) / self._num
        return share


def _nonzeros(tensor: torch.Tensor) -> _NonZeros | None:
    """Count in a large operand, at places that lie on no row, column or diagonal more often than elsewhere."""
    num = tensor.numel()
    if not tensor.is_floating_point() or num < _LEAST_ELEMENTS or not is_plain(tensor) or is_capturing():
        return None
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):  # what is expanded repeats elements
        return None
    steps = {step + more for step in tensor.stride() for more in (0, 1) if step > 0}
    stride = max(1, num // _NUM_LOOKED_AT)
    while any(gcd(stride, step) > 1 for step in steps):
        stride += 1
    return _NonZeros(tensor.as_strided(((num - 1) // stride + 1,), (stride,)))


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of its storage."""
    try:
        return bool(tensor.numel() * tensor.element_size() == storage_of(tensor).nbytes())
    except (NotImplementedError, RuntimeError, AttributeError):
        return False


class Unchanged:
    """Which storages exist when this is made, and have not been written to when asked later."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = _versions(tensors)

    def keys(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the keys of those among the storages of some tensors."""
        now = _versions(tensors)
        then = {key: version for key, (storage, version) in self._versions.items() if storage() is not None}
        return {key for key, (_, version) in now.items() if then.get(key) == version}


def _versions(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[weakref.ref[Any], int]]:
    """Return by key each storage and how often it was written to."""
    found: dict[int, tuple[weakref.ref[Any], int]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            key = storage_key(tensor) if is_plain(tensor) and not tensor.is_inference() else None
            if key is not None:
                version = max(tensor._version, found[key][1] if key in found else 0)
                found[key] = weakref.ref(storage_of(tensor)), version
    return found
