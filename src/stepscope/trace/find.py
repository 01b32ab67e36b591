"""The trace files that a path means (a file, a folder of ranks, a recording), read one after the other."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from stepscope.errors import TraceError, Unavailable, UsageError
from stepscope.trace.cache import open_trace
from stepscope.trace.compile_file import COMPILE_FILE, compile_file_of_trace
from stepscope.trace.dumps.rank_states import HANG_FILE
from stepscope.trace.execution_trace import process_of, with_inputs
from stepscope.trace.kind import BEGINNING, SQLITE, Kind, beginning_of, follow_link, is_sqlite, kind_of
from stepscope.trace.memory_file import MEMORY_FILE
from stepscope.trace.recording import RECORDING_FILE
from stepscope.trace.source import Document, Source
from stepscope.trace.tables import Trace, facts_of

TRACE_FOLDER = "trace"
NOT_TRACES = (RECORDING_FILE, COMPILE_FILE, MEMORY_FILE, HANG_FILE)
ENDINGS = (".json", ".json.gz", ".sqlite", ".db")

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
    process: int | None = None
    """Which process of a database of Nsight Systems or rocprofv3, where several used GPUs: each is a rank."""
    execution_traces: tuple[tuple[str, Path], ...] = ()
    """Files that may have the inputs of its ops, each with its process."""


def find_traces(paths: Sequence[Path]) -> list[TraceFile]:
    """Every trace that the paths mean, each once, by rank and then by name; a path that means none is an error."""
    files: dict[Path, Path] = {}
    for path in paths:
        try:
            for file in _traces_of(path):
                files.setdefault(file.resolve(), file)
        except OSError as error:
            raise TraceError(f"{error.filename or path}: {error.strerror or error}") from None
    beside = tuple((process, file) for file in files.values() if (process := _execution_trace(file)) is not None)
    for _, other in beside:
        del files[other.resolve()]
    if beside and not files:
        raise UsageError(
            f"{beside[0][1]} is an execution trace: it has the inputs of ops but no times. Name the trace of the "
            "profiler too, or a folder with both"
        )
    traces = []
    for file, in_name in zip(files.values(), ranks_of([file.name for file in files.values()])):
        said = _rank_in_header(file)
        rank = in_name if said is None else said
        traces.append(TraceFile(file, rank, said is not None, execution_traces=beside))
    traces.sort(key=lambda trace: (trace.rank or 0, _natural(str(trace.path))))
    split = [replace(trace, process=process) for trace in traces for process in _processes(trace.path)]
    if len(split) == len(traces):
        return split
    return [replace(trace, rank=rank) for rank, trace in enumerate(split)]


def _execution_trace(path: Path) -> str | None:
    """Return the process of an execution trace; None for any other file."""
    try:
        return process_of(beginning_of(path))
    except OSError:
        return None  # the reader says what is wrong with it


def _processes(path: Path) -> list[int] | list[None]:
    """Return the processes of a trace that is a database; otherwise one that needs no number."""
    if not is_sqlite(path):
        return [None]
    from stepscope.trace.databases import gpu_processes

    return gpu_processes(path) or [None]


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
    if kind is Kind.RECORDING:
        return _traces_of_recording(path)
    entries = list(path.iterdir())
    if not entries:
        raise UsageError(f"{path} is empty")
    traces = [entry for entry in entries if _is_named_like_a_trace(entry) and _may_be_a_trace(entry)]
    if not traces and (inside := sorted(entry for entry in entries if kind_of(entry) is Kind.RECORDING)):
        raise UsageError(f"{path} is a folder of recordings: name one of the {len(inside)}, such as {inside[-1]}")
    if not traces:
        raise UsageError(
            f"{path} holds no trace: *.json and *.json.gz with traceEvents, *.sqlite of Nsight Systems, and *.db of "
            "rocprofv3 were looked for"
        )
    return traces


def _traces_of_recording(folder: Path) -> list[Path]:
    """The recording's own trace and, under torchrun, those of the further ranks, each in a recording of its own."""
    ranks = [entry for entry in folder.iterdir() if _RANK_FOLDER.fullmatch(entry.name)]
    folders = [found for each in (folder, *ranks) if (found := each / TRACE_FOLDER).is_dir()]
    traces = [entry for found in folders for entry in found.iterdir() if _is_named_like_a_trace(entry)]
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
    if path.suffix == ".db" and not beginning.startswith(SQLITE):
        return False
    if not beginning:
        return True  # and the reader says what is wrong with it
    if beginning.startswith(SQLITE):
        from stepscope.trace.databases import is_trace

        return is_trace(path)
    text = beginning.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return b'"ph"' in text  # every event has its phase
    if process_of(text) is not None:
        return True  # not one, but it tells more about one
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
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class RankTrace:
    """A trace that has been read, and whose it is."""

    path: Path
    rank: int
    """As the trace says it, else as file names do, else the first number that is free."""
    is_known: bool
    """Whether the trace or its name says the rank."""
    trace: Trace


def open_ranks(
    files: Sequence[TraceFile],
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Iterator[RankTrace]:
    """Every trace, or that of one rank; each is read when it is asked for.

    A file whose trace may say another rank than its name is read only where no other has the rank.
    """
    numbers = numbers_of(files)
    order = [i for i, file in enumerate(files) if rank in (None, numbers[i]) or not file.is_said_by_trace]
    if rank is not None:
        order.sort(key=lambda i: numbers[i] != rank)
    for done, i in enumerate(order):

        def report(share: float, done: int = done) -> None:
            if progress is not None:
                progress((done + share) / len(order) if rank is None else share)

        opened = open_rank(files[i], numbers[i], len(files) == 1, use_cache, report)
        numbers[i] = opened.rank
        if rank in (None, numbers[i]):
            yield opened
            if rank is not None:
                return
        del opened  # before the next is read
    if rank is not None:
        raise UsageError(f"no rank {rank}: the ranks are {', '.join(map(str, sorted(numbers)))}")


def numbers_of(files: Sequence[TraceFile]) -> list[int]:
    """The rank of each file as far as it is known before the file is read, else the first number that is free."""
    known = {file.rank for file in files}
    free = (number for number in count() if number not in known)
    return [next(free) if file.rank is None else file.rank for file in files]


def open_rank(
    file: TraceFile, number: int, is_alone: bool, use_cache: bool, progress: Callable[[float], None] | None = None
) -> RankTrace:
    """Read one file. Its rank is `number` unless its trace says another."""
    try:
        trace = open_trace(file.path, process=file.process, use_cache=use_cache, progress=progress)
    except TraceError as error:
        if is_alone:
            raise
        raise TraceError(f"{error}; to go on without it, move it elsewhere or name the other files") from None
    for process, path in file.execution_traces:
        if process in trace.threads["pid"]:
            trace = with_inputs(trace, path)
    said = trace.facts.rank
    rank, is_known = (number, file.rank is not None) if said is None else (said, True)
    return RankTrace(file.path, rank, is_known, replace(trace, compiler=compile_file_of_trace(file.path)))


def refuse_two_of_one_rank(files: Sequence[TraceFile], rank: int | None = None) -> None:
    """UsageError where two files are of one rank, of all or of the one asked for."""
    seen: dict[int, Path] = {}
    for file in files:
        number = rank_in_name(file.path.name) if file.rank is None else file.rank
        if number is not None and rank in (None, number):
            if number in seen:
                raise two_of_one_rank(number, seen[number], file.path)
            seen[number] = file.path


def two_of_one_rank(rank: int, one: Path, other: Path) -> UsageError:
    return UsageError(
        f"{one} and {other} are both of rank {rank}, as of two windows or two runs: name one file for each rank"
    )
