"""The traces of several ranks, one after the other, and no more of them than were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from stepscope.errors import TraceError, UsageError
from stepscope.trace.cache import open_trace
from stepscope.trace.compile_file import compile_file_of_trace
from stepscope.trace.find import TraceFile, rank_in_name
from stepscope.trace.tables import Trace


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
    known = {file.rank for file in files}
    free = (number for number in count() if number not in known)
    numbers = [next(free) if file.rank is None else file.rank for file in files]
    order = [i for i, file in enumerate(files) if rank in (None, numbers[i]) or not file.is_said_by_trace]
    if rank is not None:
        order.sort(key=lambda i: numbers[i] != rank)
    for done, i in enumerate(order):

        def report(share: float, done: int = done) -> None:
            if progress is not None:
                progress((done + share) / len(order) if rank is None else share)

        trace = _open(files, i, use_cache, report)
        said = trace.facts.rank
        numbers[i] = numbers[i] if said is None else said
        if rank in (None, numbers[i]):
            yield RankTrace(files[i].path, numbers[i], said is not None or files[i].rank is not None, trace)
            if rank is not None:
                return
        del trace  # before the next is read
    if rank is not None:
        raise UsageError(f"no rank {rank}: the ranks are {', '.join(map(str, sorted(numbers)))}")


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
    """The complaint, which names both."""
    return UsageError(
        f"{one} and {other} are both of rank {rank}, as of two windows or two runs: name one file for each rank"
    )


def _open(files: Sequence[TraceFile], index: int, use_cache: bool, progress: Callable[[float], None]) -> Trace:
    try:
        trace = open_trace(files[index].path, use_cache=use_cache, progress=progress)
    except TraceError as error:
        if len(files) == 1:
            raise
        raise TraceError(f"{error}; to go on without it, move it elsewhere or name the other files") from None
    return replace(trace, compiler=compile_file_of_trace(files[index].path))
