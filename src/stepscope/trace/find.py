"""The trace files that a path means: a file, a folder of ranks, or a recording."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import TraceError, Unavailable, UsageError
from stepscope.trace.cache import SUFFIX
from stepscope.trace.compile_file import COMPILE_FILE
from stepscope.trace.kind import BEGINNING, Kind, beginning_of, follow_link, kind_of
from stepscope.trace.memory_file import MEMORY_FILE
from stepscope.trace.recording import RECORDING_FILE
from stepscope.trace.source import Document, Source
from stepscope.trace.tables import facts_of

TRACE_FOLDER = "trace"
NOT_TRACES = (RECORDING_FILE, COMPILE_FILE, MEMORY_FILE)
ENDINGS = (".json", ".json.gz")

# The number in `host_1234.1694….pt.trace.json`, the profiler's own name for a file, is a process: it is no rank.
RANK_PATTERNS = [
    re.compile(rf"(?<![a-z0-9]){word}[_-]?(\d{{1,6}})(?!\d)", re.IGNORECASE) for word in ("rank", "worker")
]
_RANK_FOLDER = re.compile(r"rank\d+")


@dataclass(frozen=True)
class TraceFile:
    """One trace file, and its rank as far as that is known before the file is read."""

    path: Path
    rank: int | None
    """As the trace says it before its events, else as all names do; None where neither does."""
    is_said_by_trace: bool = False
    """Else a trace that says its rank after its events is to be believed rather than `rank`."""


def find_traces(paths: Sequence[Path]) -> list[TraceFile]:
    """Every trace that the paths mean, each once, by rank and then by name; a path that means none is an error."""
    files: dict[Path, Path] = {}
    for path in paths:
        try:
            for file in _traces_of(path):
                files.setdefault(file.resolve(), file)
        except OSError as error:
            raise TraceError(f"{error.filename or path}: {error.strerror or error}") from None
    traces = []
    for file, in_name in zip(files.values(), ranks_of([file.name for file in files.values()])):
        said = _rank_in_header(file)
        traces.append(TraceFile(file, in_name if said is None else said, said is not None))
    return sorted(traces, key=lambda trace: (trace.rank or 0, _natural(str(trace.path))))


def ranks_of(names: Sequence[str]) -> list[int | None]:
    """The rank in each file name, where all of them say one in the same way and no two the same.

    >>> ranks_of(["rank10.json", "rank_2.json.gz"])
    [10, 2]
    >>> ranks_of(["rank0_step5.json", "rank0_step9.json"]), ranks_of(["node7_1234.169.pt.trace.json"])
    ([None, None], [None])
    """
    for pattern in RANK_PATTERNS:
        ranks = [_only_number(pattern, name) for name in names]
        if None not in ranks and len(set(ranks)) == len(names):
            return ranks
    return [None] * len(names)


def rank_in_name(name: str) -> int | None:
    """The rank that a file's name says, whatever other names say.

    >>> rank_in_name("rank0_step5.json"), rank_in_name("trace_0.json")
    (0, None)
    """
    found = (_only_number(pattern, name) for pattern in RANK_PATTERNS)
    return next((rank for rank in found if rank is not None), None)


def _only_number(pattern: re.Pattern[str], name: str) -> int | None:
    numbers = pattern.findall(name)
    return int(numbers[0]) if len(numbers) == 1 else None


def _traces_of(path: Path) -> list[Path]:
    kind = kind_of(path)
    if not path.is_dir():
        if kind is not Kind.TRACE:
            raise UsageError(f"{path} is a {kind.value}, not a trace")
        return [path]
    if path.name.endswith(SUFFIX):
        raise UsageError(f"{path} only keeps what was read of a trace: name {path.with_suffix('')}")
    if kind is Kind.RECORDING:
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
        raise Unavailable(
            f"{folder} is a recording without a trace, as after a run with --trace 0 or one that ended before its "
            "trace window. `stepscope run --trace 2 train.py` records one"
        )
    return traces


def _is_named_like_a_trace(path: Path) -> bool:
    name = path.name
    if not name.endswith(ENDINGS) or name.startswith(".") or name in NOT_TRACES:
        return False
    try:
        follow_link(path)
    except UsageError as error:  # a rank must not be missing in silence
        raise UsageError(f"{error}: remove the link, or name the other files") from None
    return path.is_file()


def _may_be_a_trace(path: Path) -> bool:
    """False only for JSON that surely is something else: settings and results lie beside traces."""
    try:
        beginning = beginning_of(path)
    except OSError:
        beginning = b""
    if not beginning:
        return True  # and the reader says what is wrong with it
    text = beginning.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return b'"ph"' in text  # every event has its phase
    return b'"traceEvents"' in text or not text.startswith(b"{") or _has_events(path)


def _rank_in_header(path: Path) -> int | None:
    """The rank that a trace says before its events; None where it says none there, or cannot be read."""
    with suppress(TraceError), closing(Source(path)) as source:
        document = Document(source)
        document.read_header(BEGINNING)
        return facts_of(document.fields).rank
    return None


def _has_events(path: Path) -> bool:
    with closing(Source(path)) as source:
        try:
            Document(source).read_header()
            return True
        except TraceError:
            return bool(source.warnings)  # a damaged file is not passed over in silence


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `step9` before `step10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
