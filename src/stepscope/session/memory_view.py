"""From paths to accounts of memory: a recording, a trace with `[memory]` events, a CUDA memory snapshot."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.analysis.memory.account import Account, account
from stepscope.analysis.memory.growth import Growth, growth
from stepscope.analysis.memory.snapshot import SnapshotEnd, devices_of, snapshot_memory
from stepscope.errors import MissingDependencyError, RecordingError, StepscopeError, UsageError
from stepscope.trace.memory_file import MEMORY_FILE, read_memory
from stepscope.trace.recording import RECORDING_FILE
from stepscope.trace.snapshot import read_snapshot

if TYPE_CHECKING:
    from stepscope.analysis.structure.links import Linked

SCHEMA_VERSION = 1
RECORDING, TRACE, SNAPSHOT = "recording", "trace", "snapshot"
_BEGINNING = 1 << 16


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


@dataclass(frozen=True)
class MemoryAnalysis:
    """What `stepscope analyze --memory` found."""

    reports: tuple[MemoryReport, ...]
    growth: Growth | None

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """The object that `--json` prints (docs/memory.md)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "accounts": [report.to_json(most) for report in self.reports],
            "growth": None if self.growth is None else self.growth.to_json(most),
        }

    def _repr_html_(self) -> str:
        from stepscope.render.notebook import html_of

        return html_of(self)


def analyze_memory(
    paths: Sequence[Path],
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> MemoryAnalysis:
    """Account for the memory of one path; of two recordings that differ in length or batch, also how it grows."""
    if len(paths) > 2:
        raise UsageError(f"--memory reads one path, or two recordings of two lengths: {len(paths)} were named")
    sources = [_source_of(path) for path in paths]
    if len(paths) == 2 and sources != [RECORDING, RECORDING]:
        raise UsageError(f"how memory grows is told from two recordings: these are a {' and a '.join(sources)}")
    if sources[0] == SNAPSHOT:
        return MemoryAnalysis((_of_snapshot(paths[0]),), None)
    if sources[0] == TRACE:
        return MemoryAnalysis((_of_trace(paths[0], rank, use_cache, progress),), None)
    memories = [read_memory(_memory_file(path, rank)) for path in paths]
    reports = tuple(_of_recording(path, memory) for path, memory in zip(paths, memories))
    return MemoryAnalysis(reports, growth(*memories) if len(memories) == 2 else None)


def _source_of(path: Path) -> str:
    """What a path is, by what is in it."""
    if not path.exists():
        raise UsageError(f"there is no {path}")
    if path.is_dir():
        is_recording = (path / RECORDING_FILE).is_file() or (path / MEMORY_FILE).is_file()
        return RECORDING if is_recording else TRACE
    if not path.is_file():
        raise UsageError(f"{path} is neither a file nor a folder")
    try:
        with path.open("rb") as stream:
            beginning = stream.read(_BEGINNING)
    except OSError as error:
        raise StepscopeError(f"{path}: {error.strerror or error}") from None
    if beginning[:1] == b"\x80" or path.suffix in (".pickle", ".pkl"):
        return SNAPSHOT
    if beginning[:2] == b"\x1f\x8b":
        try:
            beginning = zlib.decompressobj(wbits=31).decompress(beginning, _BEGINNING)
        except zlib.error:
            beginning = b""
    has_allocations = b'"allocations"' in beginning and b'"traceEvents"' not in beginning
    return RECORDING if path.name == MEMORY_FILE or has_allocations else TRACE


def _memory_file(path: Path, rank: int | None) -> Path:
    if path.is_file():
        return path
    folder = path / f"rank{rank}" if rank else path
    if not folder.is_dir():
        named = (re.fullmatch(r"rank(\d+)", entry.name) for entry in path.iterdir())
        ranks = sorted({0, *(int(found.group(1)) for found in named if found)})
        raise UsageError(f"no rank {rank}: the ranks are {', '.join(map(str, ranks))}")
    if not (folder / MEMORY_FILE).is_file():
        raise RecordingError(
            f"{folder} has no {MEMORY_FILE}, as a run with --no-memory, or one that ended before its memory window "
            "was over, leaves it: stepscope run SCRIPT records one"
        )
    return folder / MEMORY_FILE


def _of_recording(path: Path, memory: dict[str, Any]) -> MemoryReport:
    found = account(memory)
    notes = []
    if found.num_dropped:
        notes.append(f"{found.num_dropped:,} allocations past the recorder's limit are in none of the figures")
    if found.peak_tracked_bytes and found.remainder_bytes is None and not found.device.startswith("cpu"):
        notes.append("the allocator's own peak was not recorded: rounding and workspaces are in none of the figures")
    return MemoryReport(str(path), RECORDING, found, None, tuple(notes))


def _of_snapshot(path: Path) -> MemoryReport:
    snapshot = read_snapshot(path)
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


def _of_trace(
    path: Path, rank: int | None, use_cache: bool, progress: Callable[[float], None] | None
) -> MemoryReport:
    try:
        from stepscope.analysis.structure.links import link
        from stepscope.trace.find import find_traces
        from stepscope.trace.several import open_ranks
    except ModuleNotFoundError as error:
        if error.name not in ("polars", "msgspec"):
            raise
        raise MissingDependencyError(f"{error.name} is missing: pip install polars msgspec") from None
    opened = next(iter(open_ranks(find_traces([path]), rank, use_cache, progress)))
    return memory_of_trace(link(opened.trace))


def memory_of_recording(folder: Path, memory: dict[str, Any] | None = None) -> MemoryReport:
    """Of a recording's memory window, which may have been read already; RecordingError where it has none."""
    return _of_recording(folder, read_memory(_memory_file(folder, None)) if memory is None else memory)


def memory_of_trace(linked: Linked, memory: dict[str, Any] | None = None) -> MemoryReport:
    """Of a trace with `[memory]` events, which may have been gathered already; TraceError where it has none."""
    from stepscope.analysis.memory.trace_events import trace_memory

    memory = trace_memory(linked) if memory is None else memory
    notes = ["a trace knows ops, modules and phases; neither owners nor dtypes, shapes or places in Python"]
    if memory["allocator"] is None:
        notes.append("the trace has no totals of the allocator: every figure is the least it can be")
    return MemoryReport(str(linked.trace.path), TRACE, account(memory), None, (*notes, *linked.trace.warnings))
