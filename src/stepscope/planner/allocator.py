"""Simulates PyTorch's caching CUDA allocator: which block serves a request, and what is split, merged and kept.

Models the default settings (no expandable segments, no rounding to powers of two, no garbage collection). `allocated`
matches `torch.cuda.memory_allocated`: the size of the allocated blocks, not of the requests.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepscope.recorder.ledger.storages import Allocation

MIB = 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = MIB  # requests up to this size come from the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_SEGMENT = 10 * MIB  # larger requests below this size get a LARGE_SEGMENT
LARGE_SEGMENT = 20 * MIB
ROUND_LARGE = 2 * MIB


def rounded(num_bytes: int) -> int:
    """Return the block size for a request.

    >>> rounded(1), rounded(513)
    (512, 1024)
    """
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(block_bytes: int) -> int:
    """Return the bytes requested from the driver when no free block fits.

    >>> [segment_size(size) >> 20 for size in (512, 3 << 20, (11 << 20) + 512)]
    [2, 20, 12]
    """
    if block_bytes <= SMALL_SIZE:
        return SMALL_SEGMENT
    if block_bytes < MIN_LARGE_SEGMENT:
        return LARGE_SEGMENT
    return -(-block_bytes // ROUND_LARGE) * ROUND_LARGE


class OutOfMemory(Exception):
    """No segment fits in the capacity, even after all unused segments were released."""

    def __init__(self, requested_bytes: int, reserved_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes do not fit beside {reserved_bytes}")
        self.requested_bytes, self.reserved_bytes = requested_bytes, reserved_bytes


@dataclass(slots=True, eq=False)
class Block:
    address: int
    size: int
    is_small: bool
    previous: "Block | None" = None
    next: "Block | None" = None
    is_free: bool = False
    stream: int = 0


class Allocator:
    """Tracks `allocated_bytes` and `reserved_bytes`, and the peak of each."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        # Sorted (size, address, block): the best fit is the first that is large enough.
        self._free: dict[tuple[bool, int], list[tuple[int, int, Block]]] = defaultdict(list)
        self._next_address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Return the block for a request, from memory of the same stream. Raises OutOfMemory."""
        size = rounded(num_bytes)
        is_small = size <= SMALL_SIZE
        free = self._free[is_small, stream]
        place = bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._new_segment(size, is_small, stream)
        left = block.size - size
        if left >= MIN_BLOCK if is_small else left > SMALL_SIZE:
            rest = Block(block.address + size, left, is_small, block, block.next, stream=stream)
            if rest.next is not None:
                rest.next.previous = rest
            block.next, block.size = rest, size
            self._release(rest)
        block.is_free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free a block: it merges with free neighbors and stays reserved."""
        self.allocated_bytes -= block.size
        before, after = block.previous, block.next
        if before is not None and before.is_free:
            self._take(before)
            block.address, block.size, before = before.address, block.size + before.size, before.previous
        if after is not None and after.is_free:
            self._take(after)
            block.size, after = block.size + after.size, after.next
        block.previous, block.next = before, after
        if before is not None:
            before.next = block
        if after is not None:
            after.previous = block
        self._release(block)

    def _new_segment(self, size: int, is_small: bool, stream: int) -> Block:
        wanted = segment_size(size)
        if self.capacity_bytes is not None and self.reserved_bytes + wanted > self.capacity_bytes:
            self.num_retries += 1
            self._give_back()
            if self.reserved_bytes + wanted > self.capacity_bytes:
                raise OutOfMemory(wanted, self.reserved_bytes)
        self.reserved_bytes += wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._next_address += wanted
        return Block(self._next_address - wanted, wanted, is_small, stream=stream)

    def _give_back(self) -> None:
        """Release completely unused segments to the driver."""
        for pool, free in self._free.items():
            whole = [entry for entry in free if entry[2].previous is None and entry[2].next is None]
            self.reserved_bytes -= sum(size for size, _, _ in whole)
            gone = {address for _, address, _ in whole}
            self._free[pool] = [entry for entry in free if entry[1] not in gone]

    def _release(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small, block.stream], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.is_small, block.stream]
        free.pop(bisect_left(free, (block.size, block.address)))


MAX_REPEATS = 10  # of the last cycle, if reserved memory keeps changing


@dataclass(frozen=True)
class Replay:
    peak_allocated_bytes: int  # the peak of a cycle in the steady state
    peak_reserved_bytes: int
    peak_at: tuple[int, int]
    """The position of the peak: the cycle, counted from 1, and the number of its events so far."""
    settles_at_step: int | None
    """The first step, counted from 1, after which no step reserves more; None if memory grows or runs out."""
    out_of_memory: OutOfMemory | None
    num_retries: int  # how often the allocator had to release unused segments


class Events:
    """The allocations as events, grouped into cycles of `period` steps. Later steps repeat the last cycle.

    `allocations` have `bytes`, `born`, `died`, and `stream` if it is not the default one. `step_begins` has the
    position of the first event of each step, after those of the build, and of the first event after the last step.
    """

    def __init__(self, allocations: Sequence[Allocation], step_begins: Sequence[int], period: int = 1) -> None:
        self.sizes = [entry["bytes"] for entry in allocations]
        self.streams = [entry.get("stream", 0) for entry in allocations]
        born = [(-1 if entry["born"] is None else entry["born"], i, True) for i, entry in enumerate(allocations)]
        died = [(entry["died"], i, False) for i, entry in enumerate(allocations) if entry["died"] is not None]
        order = sorted(born + died)
        self.build, *steps = (
            [(index, is_birth) for at, index, is_birth in order if begin <= at < end]
            for begin, end in pairwise((-1, *step_begins))
        )
        self._period = period
        self.num_steps = len(steps)
        self._num_first = (len(steps) - 1) % period + 1  # steps in the first cycle
        self._num_events = list(map(len, steps))
        self.cycles = [
            [event for step in steps[max(0, end - period) : end] for event in step]
            for end in range(self._num_first, len(steps) + 1, period)
        ]
        made = {index for index, is_birth in self.cycles[-1] if is_birth}
        gone = {index for index, is_birth in self.cycles[-1] if not is_birth}
        self._left, self._let_go = sorted(made - gone), sorted(gone - made)
        self.inherited = self._inherited()
        self.without_heir = [index for index in self._left if index not in set(self.inherited.values())]

    def growth_bytes(self, size_of: Callable[[int], int] = int) -> int:
        """Return the bytes by which a step of the last cycle grows memory, in blocks of `size_of`; 0 or more."""
        asked, taken = (
            sum(count(self.sizes[i]) for i in self._left) - sum(count(self.sizes[i]) for i in self._let_go)
            for count in (int, size_of)
        )
        return -(-max(asked, taken) // self._period) if asked > 0 else 0

    def last_step(self, cycle: int) -> int:
        """Return the last step of a cycle, both counted from 1."""
        return self._num_first + (cycle - 1) * self._period

    def step_at(self, cycle: int, num_events: int) -> int:
        """Return the step, counted from 1, that a cycle has reached after `num_events`."""
        end = self.last_step(cycle)
        last = min(end, self.num_steps)  # repeated steps have the events of the last one traced
        first = max(0, last - self._period)
        for step in range(first, last):
            if num_events <= self._num_events[step]:
                return step + 1 + end - last
            num_events -= self._num_events[step]
        return end

    def is_repetitive(self) -> bool:
        """Return whether the last cycle allocates the same sizes as the one before; True if there are only two."""
        if len(self.cycles) < 3:
            return True
        before, last = (Counter(self.sizes[i] for i, is_birth in cycle if is_birth) for cycle in self.cycles[-2:])
        return before == last

    def _inherited(self) -> dict[int, int]:
        """Map what the last cycle frees but did not allocate to what takes its place when the cycle repeats.

        Matches by size in order of allocation, because the gradients of one step replace those of the previous one.
        The rest is matched by order alone.
        """
        left: dict[int, deque[int]] = defaultdict(deque)
        for index in self._left:
            left[self.sizes[index]].append(index)
        heirs = {i: left[self.sizes[i]].popleft() for i in self._let_go if left[self.sizes[i]]}
        rest = sorted(index for alike in left.values() for index in alike)
        return heirs | dict(zip((index for index in self._let_go if index not in heirs), rest))


def replay(events: Events, capacity_bytes: int | None = None, rounds: bool = True) -> Replay:
    """Replay the build, every traced cycle, and the last one again until the memory is stable.

    Without `rounds`, as on a CPU, blocks have exactly the requested size and nothing stays reserved.
    """
    heap = Allocator(capacity_bytes) if rounds else _Plain()
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
    # Cycles that differ from each other may have different peaks.
    steady = peaks[-1:] if events.is_repetitive() else [*peaks[1:num_traced], peaks[-1]]
    peak, place, number = max(steady, key=lambda found: found[0])
    settled = None if events.growth_bytes() or settles_at is None else events.last_step(settles_at)
    return Replay(peak, heap.peak_reserved_bytes, (number, place), settled, None, heap.num_retries)


def live_at_peak(events: Events, found: Replay, rounds: bool = True) -> list[tuple[int, int]]:
    """Return the index and block bytes of each allocation that is live at the peak of an unlimited replay."""
    player = _Player(events, Allocator() if rounds else _Plain())
    last, place = found.peak_at
    for number in range(last):
        player.play(number)
    player.play(last, place)
    return [(index, block.size) for index, block in (*player.blocks.items(), *player.leaked)]


class _Player:
    """Replays cycles into an allocator, and tracks the block of each allocation."""

    def __init__(self, events: Events, heap: Allocator) -> None:
        self._events, self._heap = events, heap
        self.blocks: dict[int, Block] = {}
        self.leaked: list[tuple[int, Block]] = []  # from earlier cycles, and never freed

    def play(self, number: int, num_events: int | None = None) -> tuple[int, int]:
        """Return the peak of a cycle, and the number of its events up to the peak. Cycle 0 is the build."""
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
        """Prepare to repeat the last cycle: rename what it left to what it expects to find."""
        blocks, events = self.blocks, self._events
        blocks |= {old: blocks.pop(new) for old, new in events.inherited.items() if new in blocks}
        over = [(index, blocks.pop(index)) for index in events.without_heir if index in blocks]
        if events.growth_bytes():
            self.leaked += over
            return
        for _, block in over:  # these replace something larger that was freed
            self._heap.free(block)


class _Plain(Allocator):
    """An allocator whose blocks have exactly the requested size."""

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        self.allocated_bytes += num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return Block(0, num_bytes, False)

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
