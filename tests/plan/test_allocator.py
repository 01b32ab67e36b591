"""The model of CUDA's caching allocator: sizes, splits, merges, what is given back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from stepscope.planner.allocator import MIB, Allocator, OutOfMemory


def test_small_requests_share_a_segment_of_two_mib():
    heap = Allocator()

    first, second = heap.allocate(1), heap.allocate(513)

    assert (first.size, second.size) == (512, 1024)
    assert (heap.allocated_bytes, heap.reserved_bytes) == (1536, 2 * MIB)


@pytest.mark.parametrize(
    ("request_bytes", "reserved_mib"), [(MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)]
)
def test_segments_of_large_requests(request_bytes, reserved_mib):
    heap = Allocator()

    heap.allocate(request_bytes)

    assert heap.reserved_bytes == reserved_mib * MIB


def test_a_rest_of_one_mib_stays_with_its_block_and_counts_as_allocated():
    heap = Allocator()

    heap.allocate(11 * MIB)

    assert heap.allocated_bytes == 12 * MIB


def test_the_smallest_block_that_is_large_enough_serves():
    heap = Allocator()
    blocks = [heap.allocate(size * MIB) for size in (40, 24, 32)]
    for block in blocks:
        heap.free(block)

    assert heap.allocate(23 * MIB).address == blocks[1].address
    assert heap.reserved_bytes == 96 * MIB


def test_neighbors_that_are_free_join():
    heap = Allocator()
    blocks = [heap.allocate(4 * MIB) for _ in range(5)]
    assert heap.reserved_bytes == 20 * MIB

    for block in (blocks[0], blocks[2], blocks[1], blocks[4], blocks[3]):
        heap.free(block)

    assert heap.allocate(19 * MIB).size == 20 * MIB  # one block again; a rest of 1 MiB is not split off
    assert heap.reserved_bytes == 20 * MIB


def test_at_capacity_unused_segments_are_given_back_and_used_ones_are_not():
    heap = Allocator(capacity_bytes=100 * MIB)
    kept = heap.allocate(40 * MIB)
    heap.free(heap.allocate(50 * MIB))

    heap.allocate(60 * MIB)

    assert (heap.num_retries, heap.reserved_bytes) == (1, 100 * MIB)
    with pytest.raises(OutOfMemory) as error:
        heap.allocate(2 * MIB)
    assert (error.value.requested_bytes, error.value.reserved_bytes) == (20 * MIB, 100 * MIB)
    heap.free(kept)


def test_whatever_happens_blocks_never_overlap_and_nothing_is_lost():
    heap, live, chance = Allocator(), {}, random.Random(0)
    for _ in range(3000):
        if live and chance.random() < 0.5:
            heap.free(live.pop(chance.choice(list(live))))
        else:
            block = heap.allocate(int(10 ** chance.uniform(1, 7.6)))
            live[id(block)] = block
    ordered = sorted(live.values(), key=lambda block: block.address)

    assert all(a.address + a.size <= b.address for a, b in pairwise(ordered))
    assert heap.allocated_bytes == sum(block.size for block in ordered)
    free = sum(size for pool in heap._free.values() for size, _, _ in pool)
    assert heap.reserved_bytes == heap.allocated_bytes + free
