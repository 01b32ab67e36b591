"""What one source says about memory: a recording's window, a trace's `[memory]` events or a CUDA memory snapshot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.analysis.memory.account import Account, account
from stepscope.analysis.memory.snapshot import SnapshotEnd, devices_of, snapshot_memory
from stepscope.trace.snapshot import Snapshot

if TYPE_CHECKING:
    from stepscope.analysis.structure.links import Linked

RECORDING, TRACE, SNAPSHOT = "recording", "trace", "snapshot"


@dataclass(frozen=True)
class MemoryReport:
    path: str
    source: str  # `recording`, `trace` or `snapshot`
    account: Account
    snapshot_end: SnapshotEnd | None  # the segments when a snapshot was taken
    notes: tuple[str, ...]  # what the source does not contain, and what was wrong with it

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Return the report as plain values, with at most so many rows per list."""
        end = None if self.snapshot_end is None else asdict(self.snapshot_end)
        if end is not None:
            end["live_by_caller"] = end["live_by_caller"][:most]
        return {
            "path": self.path,
            "source": self.source,
            **self.account.to_json(most),
            "snapshot_end": end,
            "notes": self.notes,
        }


def window_report(path: Path, memory: dict[str, Any], found: Account | None = None) -> MemoryReport:
    """Return the report of a recording's window; `found` is its account, if it is known already."""
    found = found or account(memory)
    notes = []
    if found.num_dropped:
        notes.append(f"{found.num_dropped:,} allocations past the recorder's limit are not counted")
    if found.peak_tracked_bytes and found.remainder_bytes is None and not found.device.startswith("cpu"):
        notes.append("the allocator's own peak was not recorded, so rounding and workspaces are not counted")
    return MemoryReport(str(path), RECORDING, found, None, tuple(notes))


def snapshot_report(path: Path, snapshot: Snapshot) -> MemoryReport:
    devices = devices_of(snapshot)
    memory, end = snapshot_memory(snapshot, devices[0] if devices else 0)
    notes = ["a snapshot contains Python call sites, but no owners, modules, ops, dtypes or shapes"]
    notes.append("bytes are what tensors requested; the history does not show how the allocator rounded them")
    if not end.num_entries:
        notes.append("the allocator's history was not recorded, so the end of the run is taken for the peak")
    if devices[1:]:
        names = ", ".join(f"cuda:{device}" for device in devices[1:])
        notes.append(f"{names} also has memory in this snapshot; the device with the most is shown")
    return MemoryReport(str(path), SNAPSHOT, account(memory), end, tuple(notes))


def trace_report(linked: Linked, memory: dict[str, Any], found: Account | None = None) -> MemoryReport:
    notes = ["a trace contains ops, modules and phases, but no owners, dtypes, shapes or Python call sites"]
    if memory["allocator"] is None:
        notes.append("the trace has no allocator totals, so every figure is a lower bound")
    return MemoryReport(
        str(linked.trace.path), TRACE, found or account(memory), None, (*notes, *linked.trace.warnings)
    )
