"""A CUDA memory snapshot in the structure that `account` reads, and its segments at the end."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stepscope.analysis.memory.account import Part, parts
from stepscope.trace.snapshot import Block, Entry, Segment, Snapshot

_IN_USE = ALLOCATED, AWAITING_FREE = "active_allocated", "active_awaiting_free"
MAX_OOMS = 100  # failures listed individually


@dataclass(frozen=True)
class OutOfMemory:
    """A failed allocation."""

    event: int
    asked_bytes: int
    free_bytes: int | None  # free memory according to CUDA
    allocated_bytes: int  # by tensors at that time
    reserved_bytes: int  # by the allocator at that time; what exceeds `allocated_bytes` was fragmented
    caller: str | None


@dataclass(frozen=True)
class SnapshotEnd:
    """The allocator's segments when the snapshot was taken."""

    num_segments: int
    reserved_bytes: int
    allocated_bytes: int  # in blocks used by tensors, including the allocator's rounding
    requested_bytes: int  # requested by tensors
    awaiting_free_bytes: int  # freed, but still in use by another stream
    num_inactive_blocks: int
    inactive_bytes: int  # free, held by the allocator
    largest_inactive_bytes: int
    releasable_bytes: int  # free in unused segments: `empty_cache()` returns these
    live_by_caller: tuple[Part, ...]  # requested by tensors, by place in Python; shares of `requested_bytes`
    num_entries: int  # entries of the allocator's history; 0 if it was not recorded
    ooms: tuple[OutOfMemory, ...]


def devices_of(snapshot: Snapshot) -> list[int]:
    """Return every device with memory or a history, the one with most memory first."""
    reserved: Counter[int] = Counter()
    for segment in snapshot.segments:
        reserved[segment.device] += segment.bytes
    reserved.update({device: 0 for device, entries in enumerate(snapshot.entries) if entries})
    return [device for device, _ in reserved.most_common()]


def snapshot_memory(snapshot: Snapshot, device: int) -> tuple[dict[str, Any], SnapshotEnd]:
    """Return one device's allocations from its history and segments, and its segments at the end.

    Bytes are those requested: a history does not contain rounded sizes.
    """
    segments = [segment for segment in snapshot.segments if segment.device == device]
    entries = snapshot.entries[device] if device < len(snapshot.entries) else []
    used = [block for segment in segments for block in segment.blocks if block.state == ALLOCATED]
    allocations = _allocations(f"cuda:{device}", entries, used)
    reserved = _reserved(entries, sum(segment.bytes for segment in segments))
    memory = {
        "device": f"cuda:{device}",
        "allocations": allocations,
        "reserved": reserved,
        "allocator": {"peak_reserved_bytes": max(num_bytes for _, num_bytes in reserved)},
    }
    return memory, _end(segments, len(entries), _ooms(entries, allocations, reserved))


def _allocations(device: str, entries: list[Entry], used: Iterable[Block]) -> list[dict[str, Any]]:
    """Return allocations with their lifetimes; `used` are the blocks in use at the end."""
    began_us = next((entry.time_us for entry in entries if entry.time_us is not None), 0)
    found: list[dict[str, Any]] = []
    alive: dict[int, dict[str, Any]] = {}

    def add(num_bytes: int, caller: str | None, **fields: Any) -> dict[str, Any]:
        lived = {"born": None, "died": None, "born_ns": None, "died_ns": None, **fields}
        found.append({"bytes": num_bytes, "device": device, "caller": caller, **lived})
        return found[-1]

    for event, entry in enumerate(entries):
        if entry.action not in ("alloc", "free_requested"):
            continue
        time_ns = None if entry.time_us is None else max(0, entry.time_us - began_us) * 1000
        # At an address in use, the history lacks the free before an allocation.
        freed = alive.pop(entry.address, None)
        if freed is not None:
            freed.update(died=event, died_ns=time_ns)
        if entry.action == "alloc":
            alive[entry.address] = add(entry.bytes, entry.caller, born=event, born_ns=time_ns)
        elif freed is None:
            add(entry.bytes, None, died=event, died_ns=time_ns)
    for block in used:
        if block.address not in alive:  # allocated before the history began
            add(block.requested_bytes, block.caller)
    return found


def _reserved(entries: list[Entry], at_end: int) -> list[tuple[int, int]]:
    """Return reserved memory from each event on that changed it, starting before the first."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    changes = [(event, signs[e.action] * e.bytes) for event, e in enumerate(entries) if e.action in signs]
    levels = [(-1, max(0, at_end - sum(change for _, change in changes)))]
    for event, change in changes:
        levels.append((event, max(0, levels[-1][1] + change)))
    return levels


def _ooms(
    entries: list[Entry], allocations: list[dict[str, Any]], reserved: list[tuple[int, int]]
) -> tuple[OutOfMemory, ...]:
    def allocated(event: int) -> int:
        return sum(
            each["bytes"]
            for each in allocations
            if (each["born"] is None or each["born"] < event) and (each["died"] is None or each["died"] > event)
        )

    found = [(event, entry) for event, entry in enumerate(entries) if entry.action == "oom"]
    return tuple(
        OutOfMemory(
            event=event,
            asked_bytes=entry.bytes,
            free_bytes=entry.free_bytes,
            allocated_bytes=allocated(event),
            reserved_bytes=[num_bytes for at, num_bytes in reserved if at <= event][-1],
            caller=entry.caller,
        )
        for event, entry in found[:MAX_OOMS]
    )


def _end(segments: list[Segment], num_entries: int, ooms: tuple[OutOfMemory, ...]) -> SnapshotEnd:
    blocks = [block for segment in segments for block in segment.blocks]
    used = [block for block in blocks if block.state == ALLOCATED]
    awaiting = [block for block in blocks if block.state == AWAITING_FREE]
    inactive = [block for block in blocks if block.state not in _IN_USE]
    empty = [segment for segment in segments if all(block.state not in _IN_USE for block in segment.blocks)]
    requested = sum(block.requested_bytes for block in used)
    return SnapshotEnd(
        num_segments=len(segments),
        reserved_bytes=sum(segment.bytes for segment in segments),
        allocated_bytes=sum(block.bytes for block in used),
        requested_bytes=requested,
        awaiting_free_bytes=sum(block.bytes for block in awaiting),
        num_inactive_blocks=len(inactive),
        inactive_bytes=sum(block.bytes for block in inactive),
        largest_inactive_bytes=max((block.bytes for block in inactive), default=0),
        releasable_bytes=sum(segment.bytes for segment in empty),
        live_by_caller=parts(((block.caller, block.requested_bytes) for block in used), requested),
        num_entries=num_entries,
        ooms=ooms,
    )
