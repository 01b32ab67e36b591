"""What there is to diagnose: a rank's trace, what a recording knows beside it, what the other ranks did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.analysis.memory.account import Account
from stepscope.analysis.memory.account import account as account_for_memory
from stepscope.analysis.memory.left_behind import MemoryGrowth, growth_between_steps, growth_in_window
from stepscope.analysis.memory.trace_events import trace_memory
from stepscope.analysis.ranks.all_ranks import AcrossRanks, Analysis
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.analysis.structure.intervals import length_ns
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.time.replay import Change, Replayed
from stepscope.analysis.time.summary import Summary, summary_of
from stepscope.analysis.time.whatif import without
from stepscope.errors import Unavailable
from stepscope.session.places import Places, places_of_stretches, places_of_work, places_without_work
from stepscope.session.typical_steps import TraceTables
from stepscope.trace.recording import Recording
from stepscope.trace.tables import Trace

WORTH_SHARE = 0.03
"""Of a step: what saves less is not worth a finding."""
_MOST_PROFILER_NS = 20_000.0


class Case(TraceTables):
    """What rules look at: tables, and what a change to the step would bring. They never see the events themselves.

    What is not there raises Unavailable, which says what to run to get it.
    """

    def __init__(
        self,
        path: Path,
        trace: Trace | None,
        rank: int = 0,
        recording: Recording | None = None,
        ranks: tuple[RankAccount, ...] = (),
        notes: tuple[str, ...] = (),
        window: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(trace, rank)
        self.path = path
        self._notes = notes
        self._recording = recording
        self._ranks = ranks
        self._window = window

    @property
    def notes(self) -> tuple[str, ...]:
        """Which of several traces this is, and whether it is whole."""
        is_cut_off = self._trace is not None and self._trace.facts.is_cut_off
        cut = ("the trace is cut off: GPU work is written last, and may be missing",) if is_cut_off else ()
        return (*self._notes, *cut)

    @property
    def recording(self) -> Recording:
        if self._recording is None:
            raise Unavailable("a trace alone does not tell: it takes a recording, made by `stepscope run train.py`")
        return self._recording

    @property
    def has_recording(self) -> bool:
        return self._recording is not None

    @cached_property
    def summary(self) -> Summary:
        """What the card shows."""
        return summary_of(self.recording)

    @cached_property
    def clean_ns(self) -> float | None:
        """The median clean step, where a recording measured it."""
        if self._recording is None or self.summary.step_ns is None:
            return None
        return self.summary.step_ns.median

    @cached_property
    def memory(self) -> Account:
        """What was live at the peak, from the recording's memory window or the trace's memory events."""
        return account_for_memory(trace_memory(self._linked) if self._window is None else self._window())

    @cached_property
    def memory_growth(self) -> MemoryGrowth | None:
        """What every step leaves behind (`analysis/memory/left_behind.py`)."""
        if self._window is not None:
            return growth_in_window(self._window())
        if self._linked.memory.is_empty():
            raise Unavailable("nothing says what stays in memory: it takes profile_memory=True, or `stepscope run`")
        if self._linked.steps.num < 2:
            raise Unavailable("the trace has no two steps to compare: schedule(wait=1, warmup=1, active=3)")
        return growth_between_steps(self._linked)

    @cached_property
    def analysis(self) -> Analysis:
        """What `stepscope analyze` shows: of every rank where a folder has several."""
        return Analysis.of(self._ranks or (self.account,))

    @property
    def across(self) -> AcrossRanks:
        """What the ranks did to one another."""
        if not self._ranks or self.analysis.across is None:
            raise Unavailable("there is one rank: it takes a folder with a trace of each")
        return self.analysis.across

    @property
    def linked(self) -> Linked:
        """The events themselves, for who draws them."""
        return self._linked

    @cached_property
    def profiler_ns_per_event(self) -> float:
        """What the profiler added to the host's time: so that the clean step comes out, where it is known."""
        if self.clean_ns is None:
            return self.replay.profiler_ns_per_event
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

    @cached_property
    def starved_ns(self) -> float:
        """How long the GPU has nothing to do in a step without the profiler, less what was launched and held: more
        than that no host can save."""
        held = self.idle.filter(pl.col("cause").cast(pl.String).is_in(["queued", "unknown"]))
        return max(0.0, self.step.done_ns - self.busy_ns - length_ns(held) / self.num_steps)

    def saving_ns(self, change: Change) -> float:
        """What a step saves with a change."""
        changed = self.replay.play(replace(change, profiler_ns_per_event=self.profiler_ns_per_event))
        return max(0.0, self.step.done_ns - changed.done_ns)

    def scaled_to(self, total_ns: float, events: Sequence[int]) -> dict[int, float]:
        """How long each piece of a call's work takes where all of it takes `total_ns`."""
        durations_ns = [self._duration_ns[event] for event in events]
        factor = total_ns / max(1, sum(durations_ns))
        return {event: ns * factor for event, ns in zip(events, durations_ns)}

    @cached_property
    def _duration_ns(self) -> dict[int, int]:
        return dict(self.work.select("event", "duration_ns").iter_rows())

    def without(self, events: pl.Series, is_loop: bool = False) -> Change:
        """The change in which some GPU work is gone, with the host's time for it (`analysis/time/whatif.py`)."""
        return without(self._linked, events.to_list(), is_loop)

    def places(self, events: Iterable[int]) -> Places:
        """Where some GPU work is, by `event`: most of it first."""
        return places_of_work(self.all_work, self.all_work["event"].is_in(list(events)))

    def host_places(self, stretches: pl.DataFrame) -> Places:
        """Where stretches of the host's time are, `start_ns` and `end_ns`: the longest first."""
        return places_of_stretches(stretches)

    def idle_places(self, idle: pl.DataFrame) -> Places:
        """Where the GPU stands again and again, from rows of `idle`: where it stands longest first."""
        return places_without_work(idle)

    def is_worth(self, saving_ns: float) -> bool:
        """Whether a saving is large enough to be told."""
        return saving_ns > 0 and saving_ns >= WORTH_SHARE * self.step_ns
