"""From paths to an analysis: finds the traces, reads them one after the other, accounts for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.trace.cache import open_trace
from stepscope.trace.find import find_traces
from stepscope.trace.tables import Trace

if TYPE_CHECKING:
    from stepscope.analysis.traces import Analysis


def analyze_paths(
    paths: Sequence[Path],
    step: int | None = None,
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Analysis:
    """Account for every trace that the paths mean. One trace is in memory at a time."""
    files = find_traces(paths)
    # Reading lets go of the interpreter, loading the analyses needs little else: a seventh of a second saved.
    Thread(target=import_module, args=("stepscope.analysis.traces",), daemon=True).start()
    accounts = []
    seen: list[int] = []
    for position, file in enumerate(files):

        def report(share: float, position: int = position) -> None:
            if progress is not None:
                progress((position + share) / len(files))

        if rank is not None and file.rank is not None and file.rank != rank:
            seen.append(file.rank)
            continue
        trace = open_trace(file.path, use_cache=use_cache, progress=report)
        number = _rank_of(trace, file.rank, position)
        seen.append(number)
        if rank is None or number == rank:
            from stepscope.analysis.rank import account

            accounts.append(account(trace, number, step))
    if not accounts:
        raise UsageError(f"no rank {rank}: there are {', '.join(map(str, sorted(seen)))}")
    from stepscope.analysis.traces import Analysis

    return Analysis.of(accounts)


def _rank_of(trace: Trace, from_name: int | None, position: int) -> int:
    """The rank: as the trace says it, else as its name does, else its place."""
    if trace.facts.rank is not None:
        return trace.facts.rank
    return position if from_name is None else from_name
