"""The accounts of many ranks, of which only a few are in memory at a time."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, overload

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.analysis.ranks.rank_account import Analysis, RankAccount, RankSummary

KEPT = 8
"""Accounts in memory: one takes about 1 MiB."""


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

        self._summaries[account.rank] = summary_of_rank(account)
        self._kept[account.rank] = account
        if len(self._kept) > KEPT:
            self._store(self._kept.pop(max(self._kept)))

    def analysis(self) -> Analysis:
        from stepscope.analysis.ranks.rank_account import Analysis

        return Analysis.of(self, [self._summaries[rank] for rank in sorted(self._summaries)])

    def path_of(self, rank: int) -> str | None:
        """Return the file of a rank; None if the rank has no account."""
        return self._summaries[rank].path if rank in self._summaries else None

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
