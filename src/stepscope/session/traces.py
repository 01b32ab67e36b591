"""From paths to an analysis: finds the traces, reads them one after the other, accounts for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.trace.find import find_traces
from stepscope.trace.several import open_ranks, refuse_two_of_one_rank, two_of_one_rank

if TYPE_CHECKING:
    from stepscope.analysis.ranks.all_ranks import Analysis
    from stepscope.analysis.ranks.rank_account import RankAccount


def analyze_paths(
    paths: Sequence[Path],
    step: int | None = None,
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Analysis:
    """Account for every trace that the paths mean. One trace is in memory at a time."""
    if not paths:
        raise UsageError("name a trace, a folder of ranks or a recording")
    files = find_traces(paths)
    refuse_two_of_one_rank(files, rank)
    # Reading lets go of the interpreter, loading the analyses needs little else: a seventh of a second saved.
    Thread(target=import_module, args=("stepscope.analysis.ranks.all_ranks",), daemon=True).start()
    accounts: dict[int, RankAccount] = {}
    for opened in open_ranks(files, rank, use_cache, progress):
        from stepscope.analysis.ranks.rank_account import account

        if opened.rank in accounts:
            raise two_of_one_rank(opened.rank, Path(accounts[opened.rank].path), opened.path)
        accounts[opened.rank] = account(opened.trace, opened.rank, step)
        del opened  # before the next is read
    from stepscope.analysis.ranks.all_ranks import Analysis

    return Analysis.of(list(accounts.values()))
