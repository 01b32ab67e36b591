"""What there is to diagnose: a rank's trace, what a recording knows beside it, what the other ranks did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import polars as pl

from stepscope.analysis.attention import attention_calls
from stepscope.analysis.links import Linked, link
from stepscope.analysis.memory_account import Account
from stepscope.analysis.memory_account import account as account_for_memory
from stepscope.analysis.rank import RankAccount, account, device_name
from stepscope.analysis.replay import PROFILER_NS_PER_EVENT, Change, Replay, Replayed, typical_steps
from stepscope.analysis.stalls import stalls
from stepscope.analysis.summary import Summary, summarise
from stepscope.analysis.syncs import syncs
from stepscope.analysis.trace_memory import trace_memory
from stepscope.analysis.traces import AcrossRanks, Analysis
from stepscope.analysis.whatif import without
from stepscope.analysis.work import work
from stepscope.devices import Device, find_device, load_ceilings
from stepscope.errors import UsageError
from stepscope.findings.finding import CannotCheck
from stepscope.trace.find import find_traces
from stepscope.trace.memory_file import MEMORY_FILE, read_memory
from stepscope.trace.recording import RECORDING_FILE, Recording, read_recording
from stepscope.trace.several import open_ranks, refuse_two_of_one_rank
from stepscope.trace.tables import Trace

WORTH_SHARE = 0.03
"""Of a step: what saves less is not worth a finding."""
_MOST_PROFILER_NS = 20_000.0


class Case:
    """The tables that rules look at, each worked out when one asks. Rules never see the events themselves.

    What is not there raises CannotCheck, which says what to run to get it.
    """

    def __init__(
        self,
        path: Path,
        trace: Trace | None,
        rank: int = 0,
        recording: Recording | None = None,
        across: AcrossRanks | None = None,
    ) -> None:
        self.path = path
        self.rank = rank
        self._trace = trace
        self._recording = recording
        self._across = across

    # What a recording knows

    @property
    def recording(self) -> Recording:
        if self._recording is None:
            raise CannotCheck("a trace alone does not tell: it takes a recording, made by `stepscope run train.py`")
        return self._recording

    @cached_property
    def summary(self) -> Summary:
        """What the card shows."""
        name = str((self.recording.facts.get("environment") or {}).get("device_name"))
        device = find_device(name)
        return summarise(self.recording, device, load_ceilings(name) if device is None else None)

    @cached_property
    def clean_ns(self) -> float | None:
        """The median clean step, where a recording measured it."""
        if self._recording is None or self.summary.step_ns is None:
            return None
        return self.summary.step_ns.median

    @cached_property
    def memory(self) -> Account:
        """What was live at the peak: of the recording's memory window, else of the trace's memory events."""
        path = self.path / MEMORY_FILE
        if self._recording is not None and path.is_file():
            return account_for_memory(read_memory(path))
        if self._linked.memory.is_empty():
            raise CannotCheck(
                "nothing says what was in memory: it takes profile_memory=True, or `stepscope run train.py`"
            )
        return account_for_memory(trace_memory(self._linked))

    @property
    def across(self) -> AcrossRanks:
        """What the ranks did to one another."""
        if self._across is None:
            raise CannotCheck("there is one rank: it takes a folder with a trace of each")
        return self._across

    # What the trace says

    @cached_property
    def _linked(self) -> Linked:
        if self._trace is None:
            raise CannotCheck("the recording has no trace: it was made with --trace 0, or ended before its window")
        return link(self._trace)

    @cached_property
    def account(self) -> RankAccount:
        """What `stepscope analyze` shows of the rank."""
        assert self._linked and self._trace is not None
        return account(self._trace, self.rank)

    @cached_property
    def replay(self) -> Replay:
        """The typical steps of the trace, to be played again."""
        return Replay(self._linked, typical_steps(self._linked))

    @cached_property
    def profiler_ns_per_event(self) -> float:
        """What the profiler added to the host's time: so that the clean step comes out, where it is known."""
        if self.clean_ns is None:
            return PROFILER_NS_PER_EVENT
        low, high = 0.0, _MOST_PROFILER_NS
        for _ in range(16):
            middle = (low + high) / 2
            is_slower = self.replay.play(Change(profiler_ns_per_event=middle)).done_ns > self.clean_ns
            low, high = (middle, high) if is_slower else (low, middle)
        return high

    @cached_property
    def step(self) -> Replayed:
        """A typical step of the trace, without the profiler."""
        return self.replay.play(Change(profiler_ns_per_event=self.profiler_ns_per_event))

    @property
    def step_ns(self) -> float:
        """A clean step: as measured, else as replayed."""
        return self.step.done_ns if self.clean_ns is None else self.clean_ns

    @property
    def num_steps(self) -> int:
        """How many the typical steps are: what is summed over a table is divided by it."""
        return self.replay.num_steps

    @cached_property
    def work(self) -> pl.DataFrame:
        """The GPU work of the typical steps (`analysis/work.py`)."""
        if not self.replay.events:
            raise CannotCheck("the trace has no GPU work: record on a GPU, with ProfilerActivity.CUDA")
        return work(self._linked).filter(pl.col("event").is_in(self.replay.events))

    @cached_property
    def attention(self) -> pl.DataFrame:
        """Calls of scaled dot-product attention in the typical steps (`analysis/attention.py`)."""
        return attention_calls(self._linked, self.work)

    @cached_property
    def stalls(self) -> pl.DataFrame:
        """Where the host did nothing for the GPU for long, in the typical steps (`analysis/stalls.py`)."""
        return stalls(self._linked, self.replay)

    @cached_property
    def syncs(self) -> pl.DataFrame:
        """Synchronisations of the typical steps, one row each (`analysis/syncs.py`)."""
        start = pl.col("start_ns")
        return syncs(self._linked).filter(start >= self.replay.start_ns, start < self.replay.end_ns)

    def phase_stretches(self, phase: str) -> pl.DataFrame:
        """When the host was in a phase, in the typical steps: `start_ns`, `end_ns`."""
        phases = self._linked.steps.phases
        inside = (pl.col("end_ns") > self.replay.start_ns) & (pl.col("start_ns") < self.replay.end_ns)
        return phases.filter(pl.col("phase") == phase, inside).select("start_ns", "end_ns")

    @cached_property
    def device(self) -> Device:
        """The device and its peaks."""
        name = device_name(self._linked)
        found = find_device(name) if name else None
        if found is None:
            raise CannotCheck(f"the peaks of {name or 'the device'} are not known: docs/measurement.md lists devices")
        return found

    def with_shapes(self) -> None:
        """CannotCheck where the trace has no shapes."""
        if self.work["shapes"].null_count() == self.work.height:
            raise CannotCheck("the trace has no shapes: record with record_shapes=True")

    # What a change would bring

    def saving_ns(self, change: Change) -> float:
        """What a step saves with a change."""
        changed = self.replay.play(replace(change, profiler_ns_per_event=self.profiler_ns_per_event))
        return max(0.0, self.step.done_ns - changed.done_ns)

    def without(self, events: pl.Series) -> Change:
        """The change in which some GPU work is gone, with the host's time for it."""
        return without(self._linked, events.to_list())

    def is_worth(self, saving_ns: float) -> bool:
        """Whether a saving is large enough to be told."""
        return saving_ns >= WORTH_SHARE * self.step_ns


def open_case(
    path: Path,
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Case:
    """The case of a trace, a folder of ranks (the first, unless one is named) or a recording."""
    recording = read_recording(path) if (path / RECORDING_FILE).is_file() else None
    if recording is not None and not recording.facts.get("trace"):
        return Case(path, None, 0, recording)
    files = find_traces([path])
    refuse_two_of_one_rank(files, rank)
    traces: dict[int, Trace] = {}
    accounts = []
    for opened in open_ranks(files, rank, use_cache, progress):
        traces = {**traces, opened.rank: opened.trace} if not traces or opened.rank < min(traces) else traces
        if len(files) > 1 and rank is None:
            accounts.append(account(opened.trace, opened.rank))
    if not traces:
        raise UsageError(f"{path}: no trace")
    first = min(traces)
    across = Analysis.of(accounts).across if len(accounts) > 1 else None
    return Case(path, traces[first], first, recording, across)
