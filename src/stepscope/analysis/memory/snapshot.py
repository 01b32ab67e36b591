"""A CUDA memory snapshot in the structure that `account` reads, and its segments at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stepscope.analysis.memory.account import Part, parts
from stepscope.trace.snapshot import Block, Entry, Segment, Snapshot

ALLOCATED = "active_allocated"
AWAITING_FREE = "active_awaiting_free"


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
    history = _History(f"cuda:{device}", entries)
    history.note_blocks(block for segment in segments for block in segment.blocks if block.state == ALLOCATED)
    held = sum(segment.bytes for segment in segments)
    reserved = history.reserved(held)
    ooms = history.ooms(reserved)
    memory = {
        "device": history.device,
        "allocations": history.allocations,
        "reserved": reserved,
        "allocator": {"peak_reserved_bytes": max(num_bytes for _, num_bytes in reserved)},
    }
    return memory, _end(segments, len(entries), ooms)


class _History:
    """Allocations with their lifetimes, from the allocator's history."""

    def __init__(self, device: str, entries: list[Entry]) -> None:
        self.device = device
        self.allocations: list[dict[str, Any]] = []
        self._entries = entries
        self._began_us = next((entry.time_us for entry in entries if entry.time_us is not None), 0)
        self._open: dict[int, int] = {}
        for event, entry in enumerate(entries):
            if entry.action == "alloc":
                self._die(entry, event)  # a free whose allocation is not in the history
                self._open[entry.address] = len(self.allocations)
                self._add(entry.bytes, entry.caller, born=event, born_ns=self._time_ns(entry))
            elif entry.action == "free_requested" and not self._die(entry, event):
                self._add(entry.bytes, None, died=event, died_ns=self._time_ns(entry))

    def note_blocks(self, blocks: Iterable[Block]) -> None:
        """Add memory in use at the end that was allocated before the history began."""
        for block in blocks:
            if block.address not in self._open:
                self._add(block.requested_bytes, block.caller)

    def reserved(self, at_end: int) -> list[tuple[int, int]]:
        """Return reserved memory from each event on that changed it, starting before the first."""
        signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
        changes = [(i, signs[e.action] * e.bytes) for i, e in enumerate(self._entries) if e.action in signs]
        level = max(0, at_end - sum(change for _, change in changes))
        levels = [(-1, level)]
        for event, change in changes:
            level = max(0, level + change)
            levels.append((event, level))
        return levels

    def ooms(self, reserved: list[tuple[int, int]]) -> tuple[OutOfMemory, ...]:
        found = [(event, entry) for event, entry in enumerate(self._entries) if entry.action == "oom"]
        return tuple(
            OutOfMemory(
                event=event,
                asked_bytes=entry.bytes,
                free_bytes=entry.free_bytes,
                allocated_bytes=sum(
                    each["bytes"]
                    for each in self.allocations
                    if (each["born"] is None or each["born"] < event)
                    and (each["died"] is None or each["died"] > event)
                ),
                reserved_bytes=[num_bytes for at, num_bytes in reserved if at <= event][-1],
                caller=entry.caller,
            )
            for event, entry in found[:MAX_OOMS]
        )

    def _add(self, num_bytes: int, caller: str | None, **fields: Any) -> None:
        lived = {"born": None, "died": None, "born_ns": None, "died_ns": None, **fields}
        self.allocations.append({"bytes": num_bytes, "device": self.device, "caller": caller, **lived})

    def _die(self, entry: Entry, event: int) -> bool:
        index = self._open.pop(entry.address, None)
        if index is not None:
            self.allocations[index].update(died=event, died_ns=self._time_ns(entry))
        return index is not None

    def _time_ns(self, entry: Entry) -> int | None:
        return None if entry.time_us is None else max(0, entry.time_us - self._began_us) * 1000


MAX_OOMS = 100  # failures listed individually


def _end(segments: list[Segment], num_entries: int, ooms: tuple[OutOfMemory, ...]) -> SnapshotEnd:
    blocks = [block for segment in segments for block in segment.blocks]
    used = [block for block in blocks if block.state == ALLOCATED]
    awaiting = [block for block in blocks if block.state == AWAITING_FREE]
    inactive = [block for block in blocks if block.state not in (ALLOCATED, AWAITING_FREE)]
    empty = [s for s in segments if all(b.state not in (ALLOCATED, AWAITING_FREE) for b in s.blocks)]
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
