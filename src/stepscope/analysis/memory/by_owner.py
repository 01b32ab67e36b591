"""Memory by owner after each allocation and free, alive at the peak by op and shape, and allocated by op.

Works on the structure of `memory.json.gz` (docs/memory.md) like `account`, with the same totals. Uses only the
standard library.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any

from stepscope.analysis.memory.account import MAX_POINTS, value_of
from stepscope.analysis.memory.module_tree import alike
from stepscope.analysis.memory.timeline import OnDevice, on_device, thinned_indices


@dataclass(frozen=True)
class LevelsBy:
    """Memory levels by owner or phase, at the moments of `Account.timeline`."""

    by: str  # `owner`, or `phase` if owners are unknown
    names: tuple[str | None, ...]  # the largest at the peak first; None if unknown
    events: tuple[int, ...]  # positions in the order of allocations and frees; -1 is before the first
    times_ns: tuple[int | None, ...]  # from the window's start; None if not measured
    levels: Mapping[str | None, Sequence[int]]  # by name, the bytes after each event; together, all allocated memory
    peak_index: int  # index of the peak


@dataclass(frozen=True)
class Alive:
    owner: str | None
    phase: str | None
    module: str | None  # `*` replaces every number
    op: str | None
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int  # total of all of them
    num_allocations: int


@dataclass(frozen=True)
class OpBytes:
    op: str
    num_allocations: int
    allocated_bytes: int  # total of all allocations
    largest_bytes: int
    at_peak_bytes: int  # of those alive at the peak


def known_split(memory: Mapping[str, Any]) -> str:
    """Return `owner` if an allocation has one, else `phase`: traces have no owners."""
    return "owner" if any(each.get("owner") is not None for each in memory["allocations"]) else "phase"


def levels_by(memory: Mapping[str, Any], by: str, most: int = MAX_POINTS, known: OnDevice | None = None) -> LevelsBy:
    """Return the levels of `memory["device"]` split by a field of its allocations, at so many moments and the peak.

    `known` are its `on_device`, if they were computed before.

    >>> here = {"device": "cpu", "owner": "parameter", "bytes": 8, "born": None, "died": None}
    >>> then = {"device": "cpu", "owner": "activation", "bytes": 12, "born": 0, "died": 1}
    >>> levels_by({"device": "cpu", "allocations": [here, then]}, "owner").levels
    {'activation': (0, 12, 0), 'parameter': (8, 8, 8)}
    """
    mine, whole = known or on_device(memory)
    kept = thinned_indices(whole.bytes, most)
    now: Counter[str | None] = Counter()
    for each in mine:
        now[value_of(each, by)] += each["bytes"] if each.get("born") is None else 0
    levels: dict[str | None, list[int]] = {name: [] for name in now}
    done = 0
    for index in kept:
        stretch = zip(whole.changed[done:index], pairwise(whole.bytes[done : index + 1]))
        for each, (before, after) in stretch:
            now[value_of(each, by)] += after - before
        done = index
        for name, so_far in levels.items():
            so_far.append(now[name])
    peak_index = kept.index(whole.peak_index)
    order = sorted(levels, key=lambda name: (-levels[name][peak_index], name or ""))
    return LevelsBy(
        by=by,
        names=tuple(order),
        events=tuple(whole.events[index] for index in kept),
        times_ns=tuple(whole.times_ns[index] for index in kept),
        levels={name: tuple(levels[name]) for name in order},
        peak_index=peak_index,
    )


def alive_at_peak(memory: Mapping[str, Any], known: OnDevice | None = None) -> tuple[Alive, ...]:
    """Return memory alive at the peak of `memory["device"]`, the largest first; adds up to `peak_tracked_bytes`."""
    mine, whole = known or on_device(memory)
    alive = [*compress(mine, whole.alive_at_peak(mine))]
    groups = alike(dict.fromkeys(each.get("module") for each in alive))
    sums: Counter[tuple[Any, ...]] = Counter()
    counts: Counter[tuple[Any, ...]] = Counter()
    for each in alive:
        shape = None if each.get("shape") is None else tuple(each["shape"])
        module = groups[each.get("module")]
        key = (each.get("owner"), value_of(each, "phase"), module, each.get("op"), each.get("dtype"), shape)
        sums[key] += each["bytes"]
        counts[key] += 1
    rows = [(*key, num_bytes, counts[key]) for key, num_bytes in sums.most_common()]
    return tuple(Alive(*row) for row in rows)


def memory_by_op(memory: Mapping[str, Any]) -> tuple[OpBytes, ...]:
    """Return allocations by op, the most bytes first, without memory from before the step.

    >>> made = {"device": "cpu", "op": "aten::mm", "born": 0, "died": None, "bytes": 12}
    >>> memory_by_op({"device": "cpu", "allocations": [made]})
    (OpBytes(op='aten::mm', num_allocations=1, allocated_bytes=12, largest_bytes=12, at_peak_bytes=12),)
    """
    mine, levels = on_device(memory)
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for each in mine:
        if each["born"] is not None:
            by_op.setdefault(str(each.get("op")), []).append(each)
    rows = [
        OpBytes(
            op=op,
            num_allocations=len(made),
            allocated_bytes=sum(each["bytes"] for each in made),
            largest_bytes=max(each["bytes"] for each in made),
            at_peak_bytes=sum(each["bytes"] for each in compress(made, levels.alive_at_peak(made))),
        )
        for op, made in by_op.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.allocated_bytes, row.op)))
