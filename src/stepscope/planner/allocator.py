"""Simulates PyTorch's caching CUDA allocator: which block serves a request, and what is split, merged and kept.

Models the default settings (no expandable segments, no rounding to powers of two, no garbage collection). `allocated`
matches `torch.cuda.memory_allocated`: the size of the allocated blocks, not of the requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

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
    """A part of a segment, free or allocated."""

    address: int
    size: int
    is_small: bool
    previous: Block | None = None
    next: Block | None = None
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
            before.size += block.size
            before.next = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and after.is_free:
            self._take(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
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
