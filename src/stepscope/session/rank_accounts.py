"""The accounts of many ranks, of which only a few are in memory at a time; each computed here or on a node."""

from __future__ import annotations

import pickle
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, overload

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.analysis.ranks.rank_account import Analysis, RankAccount, RankSummary
    from stepscope.trace.find import TraceFile

KEPT = 8
"""Accounts in memory: one takes about 1 MiB."""

Spread = Callable[[str, str, Sequence[tuple[Any, ...]]], Iterator[Any]]
"""Calls the function of a module with each of some arguments on the nodes of a cluster, and yields what it returns in
their order. The first argument is a path that the node must have."""


def accounts_from_nodes(
    spread: Spread,
    files: Sequence[TraceFile],
    step: int | None,
    use_cache: bool,
    progress: Callable[[float], None] | None,
) -> Iterator[tuple[RankAccount, bool]]:
    """Yield the account of each file, and whether its rank is known. A node sends a few percent of a trace's size."""
    from stepscope.trace.find import numbers_of

    tasks = []
    for file, number in zip(files, numbers_of(files)):
        beside = tuple((process, path.absolute()) for process, path in file.execution_traces)
        there = replace(file, path=file.path.absolute(), execution_traces=beside)
        tasks.append((str(there.path), there, number, step, use_cache))
    for done, (data, is_known) in enumerate(spread(__name__, account_for_others.__name__, tasks)):
        yield replace(pickle.loads(zlib.decompress(data)), path=str(files[done].path)), is_known
        if progress is not None:
            progress((done + 1) / len(files))


def account_for_others(
    _path: str, file: TraceFile, number: int, step: int | None, use_cache: bool
) -> tuple[bytes, bool]:
    """Return the account of a file as bytes, on a node of a cluster."""
    from stepscope.analysis.ranks.rank_account import account
    from stepscope.trace.find import open_rank

    opened = open_rank(file, number, False, use_cache)
    found = account(opened.trace, opened.rank, step)
    return zlib.compress(pickle.dumps(found, pickle.HIGHEST_PROTOCOL), 1), opened.is_known


class RankAccounts(Sequence["RankAccount"]):
    """Accounts in the order of their ranks. Those of the lowest ranks are kept, all others lie in a file.

    The file is temporary and has no name, so nobody else can write what is unpickled here.
    """

    def __init__(self) -> None:
        self._kept: dict[int, RankAccount] = {}
        self._places: dict[int, int] = {}
        self._file: IO[bytes] | None = None
        self._summaries: dict[int, RankSummary] = {}

    def add(self, account: RankAccount) -> None:
        from stepscope.analysis.ranks.rank_account import summary_of_rank
        from stepscope.trace.find import two_of_one_rank

        if account.rank in self._summaries:
            raise two_of_one_rank(account.rank, Path(self._summaries[account.rank].path), Path(account.path))
        self._summaries[account.rank] = summary_of_rank(account)
        self._kept[account.rank] = account
        if len(self._kept) > KEPT:
            self._store(self._kept.pop(max(self._kept)))

    def analysis(self) -> Analysis:
        from stepscope.analysis.ranks.rank_account import Analysis

        return Analysis.of(self, [self._summaries[rank] for rank in sorted(self._summaries)])

    def _store(self, account: RankAccount) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="stepscope-")  # noqa: SIM115  (it lives as long as this object)
                weakref.finalize(self, self._file.close)
            self._places[account.rank] = self._file.seek(0, 2)
            pickle.dump(account, self._file, pickle.HIGHEST_PROTOCOL)
            self._file.flush()
        except OSError as error:
            raise StepscopeError(
                f"the accounts of further ranks could not be written to {tempfile.gettempdir()}: "
                f"{error.strerror or error}. Set TMPDIR to a folder with about 1 MiB for each rank"
            ) from None

    def __len__(self) -> int:
        return len(self._summaries)

    def __iter__(self) -> Iterator[RankAccount]:
        return map(self._read, sorted(self._summaries))

    @overload
    def __getitem__(self, index: int) -> RankAccount: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankAccount]: ...
    def __getitem__(self, index: Any) -> Any:
        ranks = sorted(self._summaries)[index]
        return [*map(self._read, ranks)] if isinstance(index, slice) else self._read(ranks)

    def _read(self, rank: int) -> RankAccount:
        if rank in self._kept:
            return self._kept[rank]
        assert self._file is not None
        self._file.seek(self._places[rank])
        account: RankAccount = pickle.load(self._file)
        return account
