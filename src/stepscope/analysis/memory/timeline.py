"""Allocated memory after each allocation and free, in order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

BEFORE = -1  # the event before the first


@dataclass(frozen=True)
class Point:
    """Memory allocated after one allocation or free."""

    event: int  # its position in the order of allocations and frees; -1 is before the first
    time_ns: int | None  # from the window's start; None if not measured
    allocated_bytes: int
    reserved_bytes: int | None


@dataclass(frozen=True)
class Levels:
    """The level after every event, starting before the first."""

    events: Sequence[int]
    times_ns: Sequence[int | None]
    bytes: Sequence[int]
    changed: Sequence[Mapping[str, Any]]  # the allocation that begins or ends with each event but the first
    peak_index: int

    @classmethod
    def of(cls, allocations: Iterable[tuple[Mapping[str, Any], int]]) -> Levels:
        level, changes = 0, []
        for each, size in allocations:
            get = each.get
            if (born := get("born")) is None:
                level += size
            else:
                changes.append((2 * born + 1, size, get("born_ns"), each))
            if (died := get("died")) is not None:
                changes.append((2 * died, -size, get("died_ns"), each))
        changes.sort(key=itemgetter(0))  # a free before an allocation at the same position
        levels = list(accumulate(map(itemgetter(1), changes), initial=level))
        events = [BEFORE, *[change[0] // 2 for change in changes]]
        times = [None, *map(itemgetter(2), changes)]
        return cls(events, times, levels, [change[3] for change in changes], levels.index(max(levels)))

    @property
    def peak_bytes(self) -> int:
        return self.bytes[self.peak_index]

    @property
    def peak_event(self) -> int:
        return self.events[self.peak_index]

    def alive_at_peak(self, allocations: Iterable[Mapping[str, Any]]) -> Iterator[bool]:
        """Yield of each allocation whether it is alive at the peak."""
        peak = self.peak_event
        for each in allocations:
            born, died = each.get("born"), each.get("died")
            yield (born is None or born <= peak) and (died is None or died > peak)

    def between(self, first: int, end: int | None) -> tuple[int, int]:
        """Return the bytes after events `first` up to `end`, and the maximum since the one before them."""
        before = max(0, bisect_left(self.events, first) - 1)
        after = len(self.events) if end is None else max(before + 1, bisect_left(self.events, end))
        return self.bytes[after - 1], max(self.bytes[before:after])

    def points(self, reserved: Sequence[tuple[int, int]], most: int) -> tuple[Point, ...]:
        """Return at most so many levels (`thinned_indices`), with the latest `reserved` (event and bytes)."""
        points, place, held = [], 0, None
        for index in thinned_indices(self.bytes, most):
            while place < len(reserved) and reserved[place][0] <= self.events[index]:
                held = reserved[place][1]
                place += 1
            points.append(Point(self.events[index], self.times_ns[index], self.bytes[index], held))
        return tuple(points)


OnDevice = tuple[list[Mapping[str, Any]], Levels]


def on_device(memory: Mapping[str, Any]) -> OnDevice:
    """Return the allocations on `memory["device"]`, and their levels."""
    mine = [each for each in memory["allocations"] if each["device"] == memory["device"]]
    return mine, Levels.of((each, each["bytes"]) for each in mine)


def thinned_indices(levels: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most so many levels: the lowest and highest of each stretch, and both ends.

    >>> thinned_indices([0, 1, 9, 2, 1, 0, 3, 0], 4)
    [0, 2, 7]
    """
    if len(levels) <= most:
        return list(range(len(levels)))
    num_stretches = max(1, (most - 2) // 2)
    kept = {0, len(levels) - 1}
    for stretch in range(num_stretches):
        indices = range(stretch * len(levels) // num_stretches, (stretch + 1) * len(levels) // num_stretches)
        kept |= {pick(indices, key=levels.__getitem__) for pick in (min, max)}
    return sorted(kept)
