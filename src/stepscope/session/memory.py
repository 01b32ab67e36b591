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
    """What one path says about memory."""

    path: str
    source: str
    """`recording`, `trace` or `snapshot`."""
    account: Account
    snapshot_end: SnapshotEnd | None
    """A snapshot's segments when it was taken."""
    notes: tuple[str, ...]
    """What the source does not know, and what was wrong with it."""

    def to_json(self, most: int | None = None) -> dict[str, Any]:
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


def window_report(path: Path, memory: dict[str, Any]) -> MemoryReport:
    """Return the account of a recording's memory window."""
    found = account(memory)
    notes = []
    if found.num_dropped:
        notes.append(f"{found.num_dropped:,} allocations past the recorder's limit are in none of the figures")
    if found.peak_tracked_bytes and found.remainder_bytes is None and not found.device.startswith("cpu"):
        notes.append("the allocator's own peak was not recorded: rounding and workspaces are in none of the figures")
    return MemoryReport(str(path), RECORDING, found, None, tuple(notes))


def snapshot_report(path: Path, snapshot: Snapshot) -> MemoryReport:
    """Return the account of a CUDA memory snapshot."""
    devices = devices_of(snapshot)
    memory, end = snapshot_memory(snapshot, devices[0] if devices else 0)
    notes = ["a snapshot knows the place in Python; neither owners nor modules, ops, dtypes or shapes"]
    notes.append("bytes are what tensors asked for: the history does not say how the allocator rounded them")
    if not end.num_entries:
        notes.append("the allocator's history was not recorded: the end is all that is known, and taken for the peak")
    if devices[1:]:
        names = ", ".join(f"cuda:{device}" for device in devices[1:])
        notes.append(f"{names} also has memory in this snapshot; the one with most is shown")
    return MemoryReport(str(path), SNAPSHOT, account(memory), end, tuple(notes))


def trace_report(linked: Linked, memory: dict[str, Any]) -> MemoryReport:
    """Return the account of a trace's `[memory]` events."""
    notes = ["a trace knows ops, modules and phases; neither owners nor dtypes, shapes or places in Python"]
    if memory["allocator"] is None:
        notes.append("the trace has no totals of the allocator: every figure is the least it can be")
    return MemoryReport(str(linked.trace.path), TRACE, account(memory), None, (*notes, *linked.trace.warnings))
