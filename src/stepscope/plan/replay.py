"""A program's births and deaths, played to the allocator step after step until nothing changes any more."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stepscope.plan.allocator import Allocator, Block, OutOfMemory

MAX_STEPS = 12
"""Steps after which a heap that still grows is taken as it is."""


@dataclass(frozen=True)
class Replay:
    """What the allocator had to hold."""

    peak_allocated_bytes: int
    """The most in a step of the steady state."""
    peak_reserved_bytes: int
    settles_at_step: int
    """The first step, from 1, after which no step reserves more; 0 where memory ran out."""
    out_of_memory: OutOfMemory | None
    num_retries: int
    """How often the allocator had to give unused segments back."""
    at_peak: Mapping[int, int]
    """What is live at the peak: index of the allocation → bytes of its block."""


class Events:
    """Allocations as the events of each step.

    `allocations`: dictionaries with `bytes`, `born`, `died`; `step_begins`: the position of the first event of each
    step, the build before them, and of the first after the last step, which is the one that is repeated.
    """

    def __init__(self, allocations: Sequence[Mapping[str, Any]], step_begins: Sequence[int]) -> None:
        self.sizes = [entry["bytes"] for entry in allocations]
        order: list[tuple[int, int, bool]] = []
        for index, entry in enumerate(allocations):
            order.append((-1 if entry["born"] is None else entry["born"], index, True))
            if entry["died"] is not None:
                order.append((entry["died"], index, False))
        order.sort()
        self.build = [(index, is_birth) for at, index, is_birth in order if at < step_begins[0]]
        self.steps = [
            [(index, is_birth) for at, index, is_birth in order if begin <= at < end]
            for begin, end in pairwise(step_begins)
        ]
        self.inherited = self._inherited()

    def _inherited(self) -> dict[int, int]:
        """What the last step is left with and lets go → what it leaves in its place, when it is repeated.

        Paired by size, in order of birth: the gradients of one step are those of the next.
        """
        born = {index for index, is_birth in self.steps[-1] if is_birth}
        gone = {index for index, is_birth in self.steps[-1] if not is_birth}
        left: dict[int, deque[int]] = defaultdict(deque)
        for index in sorted(born - gone):
            left[self.sizes[index]].append(index)
        return {index: left[self.sizes[index]].popleft() for index in sorted(gone - born) if left[self.sizes[index]]}


def replay(events: Events, capacity_bytes: int | None = None, rounds: bool = True) -> Replay:
    """The build, every traced step, and the last one again until the heap has settled.

    Without `rounds`, as on a CPU: each request is its own size, and nothing is kept.
    """
    heap: Any = Allocator(capacity_bytes) if rounds else _Plain()
    blocks: dict[int, Block] = {}
    settles_at, reserved = 1, 0
    try:
        _play(events, events.build, heap, blocks)
        for number in range(1, MAX_STEPS + 1):
            if number <= len(events.steps):
                _play(events, events.steps[number - 1], heap, blocks)
            else:
                _repeat(events, heap, blocks)
            if heap.reserved_bytes > reserved:
                settles_at, reserved = number, heap.reserved_bytes
            elif number > len(events.steps):
                break
        heap.reset_peaks()
        place = _repeat(events, heap, blocks)
        peak = heap.peak_allocated_bytes
        at_peak = _live_at(events, place, heap, blocks)
    except OutOfMemory as error:
        return Replay(heap.peak_allocated_bytes, heap.reserved_bytes, 0, error, heap.num_retries, {})
    return Replay(peak, heap.peak_reserved_bytes, settles_at, None, heap.num_retries, at_peak)


def _play(events: Events, step: Sequence[tuple[int, bool]], heap: Any, blocks: dict[int, Block]) -> int:
    """How many of the events it takes to the most allocated."""
    peak, place = heap.allocated_bytes, 0
    for position, (index, is_birth) in enumerate(step, start=1):
        if is_birth:
            blocks[index] = heap.allocate(events.sizes[index])
            if heap.allocated_bytes > peak:
                peak, place = heap.allocated_bytes, position
        elif (block := blocks.pop(index, None)) is not None:
            heap.free(block)
    return place


def _repeat(events: Events, heap: Any, blocks: dict[int, Block]) -> int:
    _hand_over(events, blocks)
    return _play(events, events.steps[-1], heap, blocks)


def _live_at(events: Events, place: int, heap: Any, blocks: dict[int, Block]) -> dict[int, int]:
    """The blocks handed out after `place` events of one more step."""
    _hand_over(events, blocks)
    _play(events, events.steps[-1][:place], heap, blocks)
    return {index: block.size for index, block in blocks.items()}


def _hand_over(events: Events, blocks: dict[int, Block]) -> None:
    moved = {old: blocks.pop(new) for old, new in events.inherited.items() if new in blocks}
    blocks.update(moved)


class _Plain:
    """An allocator that hands out what is asked for."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.num_retries = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0

    def allocate(self, num_bytes: int) -> Block:
        self.allocated_bytes += num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return Block(0, num_bytes, False)

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
