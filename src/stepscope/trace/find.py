"""The trace files that a path means: a file, a folder of ranks, or a recording."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import TraceError, UsageError
from stepscope.trace.cache import SUFFIX
from stepscope.trace.recording import COMPILE_FILE, RECORDING_FILE
from stepscope.trace.source import Document, Source

TRACE_FOLDER = "trace"
MEMORY_FILE = "memory.json.gz"
NOT_TRACES = (RECORDING_FILE, COMPILE_FILE, MEMORY_FILE)
ENDINGS = (".json", ".json.gz")

# The number in `host_1234.1694….pt.trace.json`, the profiler's own name for a file, is a process: it is no rank.
RANK_PATTERNS = (
    re.compile(r"(?<![a-z0-9])rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?<![a-z0-9])worker[_-]?(\d{1,6})(?!\d)", re.IGNORECASE),
)
_RANK_FOLDER = re.compile(r"rank\d+")
_BEGINNING = 1 << 16


@dataclass(frozen=True)
class TraceFile:
    """One trace file, and the rank that its name says."""

    path: Path
    rank: int | None
    """None where names do not say it. A trace may say it itself, and is to be believed rather."""


def find_traces(paths: Sequence[Path]) -> list[TraceFile]:
    """Every trace that the paths mean, each once, by rank and then by name; a path that means none is an error."""
    files: dict[Path, Path] = {}
    for path in paths:
        try:
            for file in _traces_of(path):
                files.setdefault(file.resolve(), file)
        except OSError as error:
            raise TraceError(f"{error.filename or path}: {error.strerror or error}") from None
    found = list(files.values())
    ranks = ranks_of([file.name for file in found])
    traces = [TraceFile(file, rank) for file, rank in zip(found, ranks)]
    return sorted(traces, key=lambda trace: (trace.rank or 0, _natural(str(trace.path))))


def ranks_of(names: Sequence[str]) -> list[int | None]:
    """The rank in each file name, where all of them say one in the same way and no two the same.

    >>> ranks_of(["rank10.json", "rank_2.json.gz"])
    [10, 2]
    >>> ranks_of(["rank0_step5.json", "rank0_step9.json"]), ranks_of(["node7_1234.169.pt.trace.json"])
    ([None, None], [None])
    """
    for pattern in RANK_PATTERNS:
        found = [pattern.findall(name) for name in names]
        ranks = [int(numbers[0]) for numbers in found if len(numbers) == 1]
        if len(ranks) == len(set(ranks)) == len(names):
            return list(ranks)
    return [None] * len(names)


def _traces_of(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(f"there is no {path}")
    if not path.is_dir():
        return [path]
    if path.name.endswith(SUFFIX):
        raise UsageError(f"{path} only keeps what was read of a trace: name {path.with_suffix('')}")
    if (path / RECORDING_FILE).is_file():
        return _traces_of_recording(path)
    entries = list(path.iterdir())
    if not entries:
        raise UsageError(f"{path} is empty")
    traces = [entry for entry in entries if _is_named_like_a_trace(entry) and _may_be_a_trace(entry)]
    if not traces:
        raise UsageError(f"{path} holds no trace: *.json and *.json.gz with traceEvents were looked for")
    return traces


def _traces_of_recording(folder: Path) -> list[Path]:
    """The recording's own trace and, under torchrun, those of the further ranks, each in a recording of its own."""
    ranks = [entry for entry in folder.iterdir() if _RANK_FOLDER.fullmatch(entry.name)]
    folders = [recording / TRACE_FOLDER for recording in (folder, *ranks)]
    traces = [
        entry for traces in folders if traces.is_dir() for entry in traces.iterdir() if _is_named_like_a_trace(entry)
    ]
    if not traces:
        raise TraceError(
            f"{folder} is a recording without a trace, as a run with --trace 0, or one that ended before its trace "
            "window, leaves it: stepscope run --trace 2 SCRIPT records one"
        )
    return traces


def _is_named_like_a_trace(path: Path) -> bool:
    name = path.name
    return name.endswith(ENDINGS) and not name.startswith(".") and name not in NOT_TRACES and path.is_file()


def _may_be_a_trace(path: Path) -> bool:
    """False only for JSON that surely is something else: settings and results lie beside traces."""
    with path.open("rb") as stream:
        text = stream.read(_BEGINNING)
    if text.startswith(b"\x1f\x8b"):
        try:
            text = zlib.decompressobj(wbits=31).decompress(text, _BEGINNING)
        except zlib.error:
            return True  # and the reader says what is wrong with it
    text = text.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return b'"ph"' in text  # every event has its phase
    return b'"traceEvents"' in text or not text.startswith(b"{") or _has_events(path)


def _has_events(path: Path) -> bool:
    source = Source(path)
    try:
        Document(source).read_header()
        return True
    except TraceError:
        return bool(source.warnings)  # a damaged file is not passed over in silence
    finally:
        source.close()


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `step9` before `step10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
