"""A program's births and deaths, played to the allocator step after step until nothing changes any more."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stepscope.planner.allocator import Allocator, Block, OutOfMemory

MAX_REPEATS = 10
"""Of the last cycle, after which a heap that still changes is taken as it is."""


@dataclass(frozen=True)
class Replay:
    """What the allocator had to hold."""

    peak_allocated_bytes: int
    """The most in a cycle of the steady state."""
    peak_reserved_bytes: int
    peak_at: tuple[int, int]
    """Where the peak is: the cycle, from 1, and how many of its events it takes."""
    settles_at_step: int | None
    """The first step, from 1, after which no step reserves more; None where memory grows, or ran out."""
    out_of_memory: OutOfMemory | None
    num_retries: int
    """How often the allocator had to give unused segments back."""


class Events:
    """Allocations as the events of each cycle, which are so many steps that all that follows repeats the last.

    `allocations`: dictionaries with `bytes`, `born`, `died`, and `stream` where it is not the default one;
    `step_begins`: the position of the first event of each step, the build before them, and of the first after the
    last; `period`: how many steps are a cycle.
    """

    def __init__(self, allocations: Sequence[Mapping[str, Any]], step_begins: Sequence[int], period: int = 1) -> None:
        self.sizes = [entry["bytes"] for entry in allocations]
        self.streams = [entry.get("stream", 0) for entry in allocations]
        order: list[tuple[int, int, bool]] = []
        for index, entry in enumerate(allocations):
            order.append((-1 if entry["born"] is None else entry["born"], index, True))
            if entry["died"] is not None:
                order.append((entry["died"], index, False))
        order.sort()
        self.build = [(index, is_birth) for at, index, is_birth in order if at < step_begins[0]]
        steps = [
            [(index, is_birth) for at, index, is_birth in order if begin <= at < end]
            for begin, end in pairwise(step_begins)
        ]
        self._period = period
        self.num_steps = len(steps)
        self._num_first = (len(steps) - 1) % period + 1  # of the first cycle
        self._num_events = list(map(len, steps))
        self.cycles = [
            [event for step in steps[max(0, end - period) : end] for event in step]
            for end in range(self._num_first, len(steps) + 1, period)
        ]
        born = {index for index, is_birth in self.cycles[-1] if is_birth}
        gone = {index for index, is_birth in self.cycles[-1] if not is_birth}
        self._left, self._let_go = sorted(born - gone), sorted(gone - born)
        self.inherited = self._inherited()
        self.without_heir = [index for index in self._left if index not in set(self.inherited.values())]

    def growth_bytes(self, size_of: Callable[[int], int] = int) -> int:
        """What a step of the last cycle leaves more than it lets go, in blocks of `size_of` each; 0 or more."""
        asked, taken = (
            sum(count(self.sizes[i]) for i in self._left) - sum(count(self.sizes[i]) for i in self._let_go)
            for count in (int, size_of)
        )
        return -(-max(asked, taken) // self._period) if asked > 0 else 0

    def last_step(self, cycle: int) -> int:
        """The last step, from 1, of a cycle, from 1."""
        return self._num_first + (cycle - 1) * self._period

    def step_at(self, cycle: int, num_events: int) -> int:
        """The step, from 1, that a cycle has come to after so many events."""
        end = self.last_step(cycle)
        last = min(end, self.num_steps)  # what is repeated has the events of the last that was seen
        first = max(0, last - self._period)
        for step in range(first, last):
            if num_events <= self._num_events[step]:
                return step + 1 + end - last
            num_events -= self._num_events[step]
        return end

    def is_repetitive(self) -> bool:
        """Whether the last cycle allocates the same sizes as the one before; of two, nobody knows."""
        if len(self.cycles) < 3:
            return True
        before, last = (Counter(self.sizes[i] for i, is_birth in cycle if is_birth) for cycle in self.cycles[-2:])
        return before == last

    def _inherited(self) -> dict[int, int]:
        """What the last cycle is left with and lets go → what it leaves in its place, when it is repeated.

        Paired by size, in order of birth: the gradients of one step are those of the next. What then is over, in
        order of birth alone.
        """
        left: dict[int, deque[int]] = defaultdict(deque)
        for index in self._left:
            left[self.sizes[index]].append(index)
        heirs = {i: left[self.sizes[i]].popleft() for i in self._let_go if left[self.sizes[i]]}
        rest = sorted(index for alike in left.values() for index in alike)
        return heirs | dict(zip((index for index in self._let_go if index not in heirs), rest))


def replay(events: Events, capacity_bytes: int | None = None, rounds: bool = True) -> Replay:
    """The build, every traced cycle, and the last one again until the heap has settled.

    Without `rounds`, as on a CPU: each request is its own size, and nothing is kept.
    """
    heap: Any = Allocator(capacity_bytes) if rounds else _Plain()
    player = _Player(events, heap)
    num_traced = len(events.cycles)
    settles_at: int | None = 1
    reserved = 0
    peaks: list[tuple[int, int, int]] = []
    try:
        player.play(0)
        for number in range(1, num_traced + MAX_REPEATS + 1):
            peaks.append((*player.play(number), number))
            if heap.reserved_bytes > reserved:
                settles_at, reserved = number, heap.reserved_bytes
            elif number > num_traced:
                break
        else:
            settles_at = None  # it still reserves more
        peaks.append((*player.play(number + 1), number + 1))
    except OutOfMemory as error:
        return Replay(heap.peak_allocated_bytes, heap.peak_reserved_bytes, (0, 0), None, error, heap.num_retries)
    # A cycle that is not like the one before it may have its peak where another has not.
    steady = peaks[-1:] if events.is_repetitive() else [*peaks[1:num_traced], peaks[-1]]
    peak, place, number = max(steady, key=lambda found: found[0])
    settled = None if events.growth_bytes() or settles_at is None else events.last_step(settles_at)
    return Replay(peak, heap.peak_reserved_bytes, (number, place), settled, None, heap.num_retries)


def live_at_peak(events: Events, found: Replay, rounds: bool = True) -> list[tuple[int, int]]:
    """What is live at the peak of a replay that nothing limited: index of each allocation, bytes of its block."""
    player = _Player(events, Allocator() if rounds else _Plain())
    last, place = found.peak_at
    for number in range(last):
        player.play(number)
    player.play(last, place)
    return [(index, block.size) for index, block in (*player.blocks.items(), *player.leaked)]


class _Player:
    """Plays cycles to a heap, and knows which allocation has which block."""

    def __init__(self, events: Events, heap: Any) -> None:
        self._events, self._heap = events, heap
        self.blocks: dict[int, Block] = {}
        self.leaked: list[tuple[int, Block]] = []
        """Of earlier cycles, for ever."""

    def play(self, number: int, num_events: int | None = None) -> tuple[int, int]:
        """The most allocated in a cycle, and how many of its events it takes; 0 is the build."""
        events, heap, blocks = self._events, self._heap, self.blocks
        if number > len(events.cycles):
            self._hand_over()
        cycle = events.cycles[min(number, len(events.cycles)) - 1] if number else events.build
        peak, place = heap.allocated_bytes, 0
        for position, (index, is_birth) in enumerate(cycle[:num_events], start=1):
            if is_birth:
                blocks[index] = heap.allocate(events.sizes[index], events.streams[index])
                if heap.allocated_bytes > peak:
                    peak, place = heap.allocated_bytes, position
            elif (block := blocks.pop(index, None)) is not None:
                heap.free(block)
        return peak, place

    def _hand_over(self) -> None:
        """Before the last cycle is repeated: what it left is what it will find."""
        blocks, events = self.blocks, self._events
        blocks |= {old: blocks.pop(new) for old, new in events.inherited.items() if new in blocks}
        over = [(index, blocks.pop(index)) for index in events.without_heir if index in blocks]
        if events.growth_bytes():
            self.leaked += over
            return
        for _, block in over:  # in place of something larger that is gone
            self._heap.free(block)


class _Plain:
    """An allocator that hands out what is asked for."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.num_retries = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        self.allocated_bytes += num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return Block(0, num_bytes, False)

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
