"""One path, opened: what it is, and every view of it that the source has. Views are computed once, when asked for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope import errors
from stepscope.errors import RecordingError, TraceError, Unavailable, UsageError, if_available
from stepscope.session.rank_accounts import RankAccounts, Spread, accounts_from_nodes
from stepscope.trace.kind import Kind, kind_of
from stepscope.trace.memory_file import MEMORY_FILE, read_memory
from stepscope.trace.recording import RECORDING_FILE, Recording, read_recording
from stepscope.trace.sweep_file import Sweep, read_sweep

if TYPE_CHECKING:
    from stepscope.analysis.comparison.sweeps import SweepSummary
    from stepscope.analysis.ranks.rank_account import Analysis, RankAccount
    from stepscope.analysis.run.series import Run
    from stepscope.analysis.structure.links import Linked
    from stepscope.analysis.time.summary import Summary
    from stepscope.session.case import Case
    from stepscope.session.memory import MemoryReport
    from stepscope.session.reports import AttentionReport, CopiesReport
    from stepscope.trace.find import RankTrace, TraceFile
    from stepscope.trace.snapshot import Snapshot

PathLike = str | os.PathLike[str]
Progress = Callable[[float], None]

RUNS_FOLDER = Path("runs")  # where `stepscope run` writes without -o


def open_session(
    path: PathLike | Sequence[PathLike] | None = None,
    *,
    rank: int | None = None,
    use_cache: bool = True,
    progress: Progress | None = None,
    spread: Spread | None = None,
) -> Session:
    """Return the session of a path, of several trace files of one run, or of the latest run if no path is given.

    Nothing is read yet beyond what tells the kind of the path. UsageError if the path is nothing Stepscope reads.
    With `spread`, the accounts of several ranks are computed on the nodes of a cluster.
    """
    named = [path] if isinstance(path, (str, os.PathLike)) else path or [latest_run()]
    paths = tuple(map(Path, named))
    kinds = [kind_of(each) for each in paths]
    if rank is not None and kinds == [Kind.RECORDING]:
        # A recording of several ranks is that of the first, with those of the others inside it.
        inside = paths[0] / f"rank{rank}"
        if inside.is_dir() and kind_of(inside) is Kind.RECORDING:
            paths, rank = (inside,), None
    session = Session(paths, kinds[0] if len(paths) == 1 else Kind.RANKS, rank, use_cache, progress, spread)
    if session.kind is Kind.RANKS:
        _ = session.trace_files  # UsageError for a folder without a trace
    return session


def latest_run(folder: Path = RUNS_FOLDER) -> Path:
    """Return the recording under `folder` that was written last; UsageError if there is none."""
    found = list(folder.glob(f"*/{RECORDING_FILE}"))
    if not found:
        raise UsageError(
            f"no path was given, and {folder}/ holds no recording: run `stepscope run train.py` or `stepscope demo`"
        )
    return max(found, key=lambda file: file.stat().st_mtime_ns).parent


def need_read_side() -> None:
    """Raise MissingDependencyError if a library that reading traces needs is not installed."""
    for name in ("polars", "msgspec"):
        if importlib.util.find_spec(name) is None:
            raise errors.MissingDependencyError(f"{name} is missing: pip install polars msgspec")


class Session:
    """What one path holds. A view that the source does not have raises Unavailable, which says what to run.

    Opening and every view of a recording alone need only the standard library.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        kind: Kind,
        rank: int | None = None,
        use_cache: bool = True,
        progress: Progress | None = None,
        spread: Spread | None = None,
    ) -> None:
        self.paths, self.kind, self.rank = tuple(paths), kind, rank
        self.use_cache, self._progress, self._spread = use_cache, progress, spread

    def __repr__(self) -> str:
        return f"<Session {self.kind.value}: {', '.join(map(str, self.paths))}>"

    @property
    def path(self) -> Path:
        """The path that was named; the first of several."""
        return self.paths[0]

    @property
    def is_recording(self) -> bool:
        """Whether a run recorded it, with step times and facts beside the trace."""
        return self.kind is Kind.RECORDING

    @cached_property
    def recording(self) -> Recording:
        """The facts and step times of a recording."""
        if not self.is_recording:
            raise self._lacks("recording", "record one with `stepscope run train.py`")
        return read_recording(self.path)

    def release(self) -> None:
        """Forget the steps of a recording; they are read again if asked for. For one rank of many."""
        for view in ("recording", "run"):
            vars(self).pop(view, None)

    @cached_property
    def summary(self) -> Summary:
        """The figures of a recording: step time, phases, throughput, MFU."""
        from stepscope.analysis.time.summary import summary_of

        return summary_of(self.recording)

    @cached_property
    def run(self) -> Run:
        """The whole run of a recording, from its first step to its last."""
        from stepscope.session.run import read_history, run_of

        return run_of(self.recording, read_history(self.path))

    @cached_property
    def rank_folders(self) -> dict[int, Path]:
        """The folders of the other ranks of a run under torchrun, which lie inside the first rank's, by rank."""
        found = [each for each in self.path.glob("rank*") if each.name[4:].isdecimal() and each.is_dir()]
        return {int(each.name[4:]): each for each in sorted(found, key=lambda each: int(each.name[4:]))}

    @cached_property
    def rank_recordings(self) -> dict[int, Session]:
        """The recordings of the other ranks, by rank."""
        return {
            rank: Session([folder], Kind.RECORDING, None, self.use_cache)
            for rank, folder in self.rank_folders.items()
            if kind_of(folder) is Kind.RECORDING
        }

    @cached_property
    def trace_files(self) -> list[TraceFile]:
        """The trace file of every rank; Unavailable for a recording without a trace."""
        need_read_side()
        from stepscope.trace.find import find_traces

        return find_traces(self.paths)

    def traces(self, rank: int | None = None) -> Iterator[RankTrace]:
        """Read every trace, or those of one rank, each when it is asked for; two of one rank are two traces."""
        files = self.trace_files
        from stepscope.trace.find import open_ranks

        return open_ranks(files, self.rank if rank is None else rank, self.use_cache, self._progress)

    def _ranks(self, rank: int | None = None) -> Iterator[RankTrace]:
        """Read every rank, or one, each when it is asked for; UsageError if a rank has two traces."""
        files = self.trace_files
        from stepscope.trace.find import refuse_two_of_one_rank

        refuse_two_of_one_rank(files, self.rank if rank is None else rank)
        return self.traces(rank)

    def analyze(self, step: int | None = None, rank: int | None = None) -> Analysis:
        """Return where the time goes on every rank. One trace is in memory at a time, and none is kept."""
        accounts = RankAccounts()
        if rank is None and self.rank is None and (found := self._from_nodes(step)):
            for each, _ in found:
                accounts.add(each)
            return accounts.analysis()
        traces = self._ranks(rank)
        for opened in traces:
            from stepscope.analysis.ranks.rank_account import last_account

            accounts.add(last_account(opened.trace, opened.rank, step))
            del opened  # before the next is read
        return accounts.analysis()

    def _from_nodes(self, step: int | None = None) -> Iterator[tuple[RankAccount, bool]] | None:
        """Return every rank's account, computed on nodes, and whether its rank is known; None to do it here."""
        if self._spread is None or len(self.trace_files) < 2:
            return None
        from stepscope.trace.find import refuse_two_of_one_rank

        refuse_two_of_one_rank(self.trace_files)
        return accounts_from_nodes(self._spread, self.trace_files, step, self.use_cache, self._progress)

    @cached_property
    def case(self) -> Case:
        """What rules look at: the first rank's typical steps, the recording, the other ranks' accounts."""
        need_read_side()
        facts = self._facts_of_case()
        from stepscope.session.case import Case

        return Case(self.path, *facts)

    def _facts_of_case(self) -> tuple[Any, ...]:
        def summary(_: Recording) -> Summary:
            return self.summary

        recording = self.recording if self.is_recording else None
        window = (lambda: self.allocations) if self.has_memory_window else None
        files = if_available(lambda: self.trace_files)
        if files is None:  # a recording without a trace still answers some rules
            return None, 0, recording, window, None, (), summary
        first: RankTrace | None = None
        accounts, notes, is_known = RankAccounts(), [], True
        try:
            if self.rank is None and (found := self._from_nodes()):
                for each, is_sure in found:
                    accounts.add(each)
                    is_known = is_known and is_sure
                first = next(self._ranks(accounts[0].rank))
            for opened in self._ranks() if first is None else ():
                first = opened if first is None or opened.rank < first.rank else first
                is_known = is_known and opened.is_known
                if len(files) > 1 and self.rank is None:
                    from stepscope.analysis.ranks.rank_account import account

                    accounts.add(account(opened.trace, opened.rank))
                del opened  # before the next is read
        except TraceError as error:
            if recording is None:
                raise
            # A run that was killed while it wrote its trace: what the steps show still holds.
            return None, 0, recording, window, None, (f"the trace was left out: {error}",), summary
        assert first is not None, "a path without traces is refused before"
        if accounts:
            which = f"of {len(files)} traces this is rank {first.rank}, {first.path.name}"
            notes.append(f"{which}; --rank chooses another")
        if accounts and not is_known:
            unknown = "neither the traces nor their names say their ranks"
            notes.append(f"{unknown}: of different runs, name one file at a time")
        return first.trace, first.rank, recording, window, accounts, tuple(notes), summary

    @cached_property
    def linked(self) -> Linked:
        """The events of the first rank's trace, linked to one another."""
        if "case" in vars(self):
            return self.case.linked
        traces = self.traces()
        from stepscope.analysis.structure.links import link

        return link(next(traces).trace)

    @property
    def analysis(self) -> Analysis:
        """Where the time goes on every rank, of the trace that `case` keeps."""
        return self.case.analysis

    @cached_property
    def attention(self) -> AttentionReport:
        """Every attention call, the backend it ran on, and why it was not flash."""
        from stepscope.session.reports import attention_report

        return attention_report(self.case)

    @cached_property
    def copies(self) -> CopiesReport:
        """Where copies and casts come from, and what a step would save without each."""
        from stepscope.session.reports import copies_report

        return copies_report(self.case)

    @cached_property
    def memory_file(self) -> Path | None:
        """The file of the memory window; None without one."""
        if self.kind is Kind.MEMORY and self.path.is_file():
            return self.path
        if self.kind not in (Kind.RECORDING, Kind.MEMORY):
            return None
        folder = self.path / f"rank{self.rank}" if self.rank else self.path
        if not folder.is_dir():
            raise UsageError(f"no rank {self.rank}: the ranks are {', '.join(map(str, [0, *self.rank_folders]))}")
        return folder / MEMORY_FILE if (folder / MEMORY_FILE).is_file() else None

    @property
    def has_memory_window(self) -> bool:
        """Whether a recording's memory window tells the memory; otherwise only a trace or a snapshot can."""
        return self.memory_file is not None

    @cached_property
    def allocations(self) -> dict[str, Any]:
        """Every allocation of the memory window, the snapshot or the trace, in the structure of docs/memory.md."""
        if self.memory_file is not None:
            try:
                return read_memory(self.memory_file)
            except RecordingError as error:
                raise Unavailable(str(error)) from None
        if self.kind is Kind.SNAPSHOT:
            from stepscope.analysis.memory.snapshot import devices_of, snapshot_memory

            return snapshot_memory(self.snapshot, (devices_of(self.snapshot) or [0])[0])[0]
        try:
            linked = self.linked
            if "case" in vars(self):
                return self.case.allocations
        except Unavailable:
            if not self.is_recording:
                raise
            raise Unavailable(
                f"{self.path} has neither a memory window nor a trace, as after a run with --no-memory or one that "
                "ended early. Record one with `stepscope run train.py`"
            ) from None
        from stepscope.analysis.memory.allocator_events import trace_memory

        return trace_memory(linked)

    @cached_property
    def memory(self) -> MemoryReport:
        """What was live at the peak, by owner, op and module."""
        from stepscope.session.memory import snapshot_report, trace_report, window_report

        if self.kind is Kind.SNAPSHOT:
            return snapshot_report(self.path, self.snapshot)
        allocations = self.allocations  # first: it says what to record if there is no trace either
        found = self.case.memory if "case" in vars(self) else None
        if self.has_memory_window:
            return window_report(self.path, allocations, found)
        return trace_report(self.linked, allocations, found)

    @cached_property
    def snapshot(self) -> Snapshot:
        """A CUDA memory snapshot, read without executing anything in it."""
        if self.kind is not Kind.SNAPSHOT:
            raise self._lacks("memory snapshot", "write one with torch.cuda.memory._dump_snapshot()")
        from stepscope.trace.snapshot import read_snapshot

        return read_snapshot(self.path)

    @cached_property
    def sweep(self) -> Sweep:
        """The rows of a sweep as they were written, and what they ran on."""
        if self.kind is not Kind.SWEEP:
            raise self._lacks("sweep", "run one with `stepscope bench`")
        return read_sweep(self.path)

    @cached_property
    def sweep_summary(self) -> SweepSummary:
        """The figures of a sweep: times, rates, MFU, and the best of what computes the same."""
        from stepscope.analysis.comparison.sweeps import sweep_of

        return sweep_of(self.sweep.rows, self.sweep.environments)

    def _lacks(self, what: str, remedy: str) -> Unavailable:
        return Unavailable(f"{self.path} is a {self.kind.value}, not a {what}: {remedy}")
