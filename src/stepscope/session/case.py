"""What rules look at: tables of a trace's typical steps, and what a change to the step would save."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from stepscope.analysis.attention.backends import DISPATCHER, attention_calls, handwritten_attention
from stepscope.analysis.compiler.compiled_regions import compiled_regions
from stepscope.analysis.costs.own_rates import own_device
from stepscope.analysis.kernels.copies import copies
from stepscope.analysis.kernels.extra_work import nan_checks, recomputed
from stepscope.analysis.kernels.fusible import logits, segments, with_fused_ns
from stepscope.analysis.kernels.kernels import kernel_sizes
from stepscope.analysis.memory import account as memory_account
from stepscope.analysis.memory.allocator_events import trace_memory
from stepscope.analysis.memory.left_behind import MemoryGrowth, growth_between_steps, growth_in_window
from stepscope.analysis.precision.casts import casts
from stepscope.analysis.ranks.rank_account import AcrossRanks, Analysis, RankAccount, account_of, device_name
from stepscope.analysis.structure.cpu_work import with_cpu_work
from stepscope.analysis.structure.intervals import length_ns, spans, union
from stepscope.analysis.structure.links import Linked, link
from stepscope.analysis.structure.op_log import logged_ops
from stepscope.analysis.structure.work import with_sizes, work
from stepscope.analysis.time.cpu_ledger import BETWEEN, cpu_ledger
from stepscope.analysis.time.idle_causes import idle_gaps
from stepscope.analysis.time.ledger import Ledger, LedgerFacts, ledger
from stepscope.analysis.time.loop_time import beside_ns
from stepscope.analysis.time.overhead import Overhead
from stepscope.analysis.time.replay import Change, Replay, Replayed, typical_steps
from stepscope.analysis.time.stalls import stalls
from stepscope.analysis.time.summary import Summary, summary_of
from stepscope.analysis.time.waits import round_trips, waits
from stepscope.analysis.time.what_if import Saving, spared_ns, stretches, without
from stepscope.devices import Device, find_device
from stepscope.errors import Unavailable, if_available
from stepscope.session.per_step import LENGTH, PerStep
from stepscope.session.places import Places, places_of_stretches, places_of_work
from stepscope.session.rank_accounts import RankAccounts
from stepscope.trace.recording import Recording
from stepscope.trace.tables import Trace

if TYPE_CHECKING:
    from stepscope.analysis.run.series import Run

__all__ = ["LENGTH", "WORTH_SHARE", "WORTH_WITHOUT_GPU", "Case"]

WORTH_SHARE = 0.03  # the share of a step that a finding must save to be reported
WORTH_WITHOUT_GPU = 0.05  # the same on a CPU, where workers and training compete for the same cores


@dataclass(eq=False, repr=False)
class Case(PerStep):
    """One rank's trace, with the recording and the other ranks' accounts where there are any.

    A table is computed once, when a rule asks for it, of the typical steps. Unavailable says what to run to get it.
    """

    path: Path
    _trace: Trace | None
    rank: int = 0
    _recording: Recording | None = None
    _window: Callable[[], dict[str, Any]] | None = None  # reads the recording's memory window
    _ranks: RankAccounts | None = None
    _notes: tuple[str, ...] = ()
    _summary: Callable[[Recording], Summary] = summary_of

    @property
    def recording(self) -> Recording:
        if self._recording is None:
            raise Unavailable("This takes a recording, not only a trace. Make one with `stepscope run train.py`.")
        return self._recording

    @property
    def has_recording(self) -> bool:
        return self._recording is not None

    @property
    def is_on_cpu(self) -> bool:
        """Whether a recording shows that training ran on a CPU."""
        return self.has_recording and self.recording.facts.get("environment", {}).get("device") == "cpu"

    @cached_property
    def summary(self) -> Summary:
        return self._summary(self.recording)

    @property
    def compile_report(self) -> dict[str, Any]:
        """`compile.json` of the recording; empty if nothing was compiled or there is only a trace."""
        return dict(self._recording.compiler or {}) if self._recording is not None else {}

    @cached_property
    def run(self) -> "Run":
        """The whole run, from its first step to its last (`session/run.py`)."""
        from stepscope.session.run import read_history, run_of

        return run_of(self.recording, read_history(self.recording.folder))

    @cached_property
    def clean_ns(self) -> float | None:
        """The median step time without the profiler, if a recording measured it."""
        times = None if self._recording is None else self.summary.step_ns
        return None if times is None else times.median

    @cached_property
    def allocations(self) -> dict[str, Any]:
        """Every allocation of the recording's memory window, or else of the trace's memory events."""
        return trace_memory(self.linked) if self._window is None else self._window()

    @cached_property
    def memory(self) -> memory_account.Account:
        """What was live at the peak."""
        return memory_account.account(self.allocations)

    @cached_property
    def memory_growth(self) -> MemoryGrowth | None:
        """The memory that every step leaves behind (`analysis/memory/left_behind.py`)."""
        return growth_between_steps(self.linked) if self._window is None else growth_in_window(self._window())

    # -- the trace ------------------------------------------------------------------------------------------------

    @cached_property
    def linked(self) -> Linked:
        """The events of the trace, linked to one another."""
        if self._trace is None:
            raise Unavailable("The recording has no trace: it ran with --trace 0, or ended before its trace window.")
        return link(self._trace)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which of several traces this is, whether it is complete, and what of the recording could not be read."""
        damaged = (*self._recording.warnings, *self.run.problems) if self._recording is not None else ()
        is_cut = self._trace is not None and self._trace.facts.is_cut_off
        cut = ["the trace is cut off: GPU work is written last, and may be missing"] if is_cut else []
        return (*self._notes, *cut, *damaged)

    @cached_property
    def account(self) -> RankAccount:
        return account_of(self.linked, self.rank)

    @cached_property
    def analysis(self) -> Analysis:
        """Where the time goes on every rank."""
        return self._ranks.analysis() if self._ranks else Analysis.of((self.account,))

    @property
    def across(self) -> AcrossRanks:
        """How the ranks wait for one another."""
        if not self._ranks or self.analysis.across is None:
            raise Unavailable("There is only one rank. Pass a folder with one trace per rank.")
        return self.analysis.across

    @cached_property
    def device(self) -> Device:
        """The device and its peak rates; for a CPU, the rates of its own ops."""
        name = device_name(self.linked)
        if name is None and self.is_on_cpu:
            return own_device(self.work)
        found = find_device(name) if name else None
        if found is None:
            raise Unavailable(f"The peak rates of {name or 'the device'} are unknown; see docs/measurement.md.")
        return found

    # -- tables of the typical steps ------------------------------------------------------------------------------

    @cached_property
    def replay(self) -> Replay:
        """The typical steps, ready to be replayed with a change."""
        return Replay(self.linked, typical_steps(self.linked))

    @property
    def num_steps(self) -> int:
        return self.replay.num_steps

    def within(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of a table that begin in the typical steps."""
        return table.filter(pl.col("start_ns") >= self.replay.start_ns, pl.col("start_ns") < self.replay.end_ns)

    @property
    def has_gpu_work(self) -> bool:
        """Whether there is a trace with GPU work in its typical steps."""
        return self._trace is not None and bool(self.replay.events)

    @cached_property
    def clean_share(self) -> float:
        """The time of a step without the profiler ÷ that of a traced step on the host."""
        return self.step_ns * self.num_steps / max(1, self.replay.end_ns - self.replay.start_ns)

    @cached_property
    def _worked(self) -> Linked:
        return with_cpu_work(self.linked, self.clean_share) if self.is_on_cpu else self.linked

    @cached_property
    def all_work(self) -> pl.DataFrame:
        """The work of the whole trace on its GPU, or else its CPU (`analysis/structure/work.py`)."""
        return work(self._worked)

    @cached_property
    def work(self) -> pl.DataFrame:
        """The GPU work, or the ops of a CPU (`analysis/structure/work.py`, `cpu_work.py`)."""
        if self.is_on_cpu:
            return self.within(self.all_work)
        if not self.replay.events:
            if self.linked.trace.facts.is_cut_off:
                raise Unavailable("The trace is cut off, and GPU work is written last. Record it again.")
            raise Unavailable("The trace has no GPU work. Record on a GPU, with ProfilerActivity.CUDA.")
        return self.all_work.filter(pl.col("event").is_in(self.replay.events))

    @cached_property
    def logged_steps(self) -> pl.DataFrame:
        """The ops of all steps with the line behind each, the use of its result, and their time (`op_log.py`)."""
        return logged_ops(self.allocations, self.linked.host, None if self.is_on_cpu else self.all_work)

    def with_shapes(self, and_dtypes: bool = False) -> None:
        """Raise Unavailable if the trace has no tensor shapes, or no dtypes where a rule needs them."""
        if self.work["shapes"].null_count() == self.work.height:
            raise Unavailable("The trace has no tensor shapes. Record with record_shapes=True.")
        if and_dtypes and self.work["dtypes"].null_count() == self.work.height:
            raise Unavailable("The trace has shapes but no dtypes. Add an execution trace, or use torch.profiler.")

    @cached_property
    def sized(self) -> pl.DataFrame:
        """The GPU work with the sizes of its tensors (`analysis/structure/work.py`)."""
        return with_sizes(self.work)

    @cached_property
    def busy_ns(self) -> float:
        """How long the GPU works per step, on any of its streams."""
        return length_ns(union(spans(self.work))) / self.num_steps

    @cached_property
    def kernel_sizes(self) -> pl.DataFrame:
        """Kernels per step by their duration (`analysis/kernels/kernels.py`)."""
        return kernel_sizes(self.work).with_columns(pl.col("num_kernels", "total_ns") / self.num_steps)

    @cached_property
    def idle(self) -> pl.DataFrame:
        """GPU idle time by cause (`analysis/time/idle_causes.py`)."""
        start_ns, end_ns = self.replay.start_ns, self.replay.end_ns
        inside = idle_gaps(self.linked).filter(pl.col("end_ns") > start_ns, pl.col("start_ns") < end_ns)
        return inside.with_columns(pl.col("start_ns", "end_ns").clip(start_ns, end_ns))

    @cached_property
    def attention(self) -> pl.DataFrame:
        """Calls of scaled dot-product attention (`analysis/attention/backends.py`)."""
        return attention_calls(self.linked, self.work)

    @cached_property
    def handwritten_attention(self) -> pl.DataFrame:
        """The work of handwritten attention (`analysis/attention/backends.py`)."""
        return handwritten_attention(self.sized)

    @cached_property
    def logits(self) -> pl.DataFrame:
        """Work over tokens × vocabulary (`analysis/kernels/fusible.py`)."""
        return logits(self.sized)

    @cached_property
    def _in_attention(self) -> frozenset[int]:
        """The work of attention that is written by hand or runs as separate ops."""
        dispatched = self.work.filter(pl.col("root_op").cast(pl.String) == DISPATCHER)
        return frozenset({*self.handwritten_attention["event"], *dispatched["event"]})

    @cached_property
    def segments(self) -> pl.DataFrame:
        """Work that one pass over memory could do, apart from attention (`analysis/kernels/fusible.py`)."""
        found = segments(self.work, self._in_attention)
        return with_fused_ns(found, if_available(lambda: self.device), self.is_on_cpu)

    @cached_property
    def ledger(self) -> Ledger:
        """The step split into the least time that its work needs and every loss (`analysis/time/ledger.py`)."""
        if self.is_on_cpu and self._trace is not None:
            phases_ns = {row.name: row.ns for row in self.summary.rows}
            if not self.summary.data_is_named:
                phases_ns[BETWEEN] = phases_ns.pop("data", 0.0)
            return cpu_ledger(self.linked, self.work, phases_ns, self.step_ns, *self._beside_ns)
        again = frozenset(self.recomputed["events"].explode().drop_nulls())
        device = if_available(lambda: self.device)
        tables = (self.work, self.segments, self.attention, self._in_attention, again, self.idle, device)
        parameters = self.recording.facts.get("parameters", {}) if self.has_recording else {}
        facts = LedgerFacts(*tables, sum(parameters.get("bytes_by_dtype", {}).values()) * self.num_steps)
        return ledger(facts, self.step_ns, self.num_steps, *self._beside_ns)

    @cached_property
    def casts(self) -> pl.DataFrame:
        """Casts between float32 and a lower precision (`analysis/precision/casts.py`)."""
        return casts(self.linked, self.work)

    @cached_property
    def recomputed(self) -> pl.DataFrame:
        """Forward ops that run again in the backward pass (`analysis/kernels/extra_work.py`)."""
        return recomputed(self.linked, self.work)

    @cached_property
    def all_copies(self) -> pl.DataFrame:
        """The GPU copies of the whole trace (`analysis/kernels/copies.py`)."""
        return copies(self.linked)

    @cached_property
    def round_trips(self) -> pl.DataFrame:
        """Tensors that go to the host and back (`analysis/time/waits.py`)."""
        return self.within(round_trips(self.linked, self.all_copies))

    @cached_property
    def waits(self) -> pl.DataFrame:
        """Where the host waits for the GPU (`analysis/time/waits.py`)."""
        return self.within(waits(self.linked, self.all_copies))

    @cached_property
    def stalls(self) -> pl.DataFrame:
        """Long stretches in which the host launches nothing (`analysis/time/stalls.py`)."""
        return stalls(self.linked, self.replay)

    @cached_property
    def nan_checks(self) -> pl.DataFrame:
        """Checks for NaN whose result the program read (`analysis/kernels/extra_work.py`)."""
        return self.within(nan_checks(self.linked))

    @cached_property
    def compiled_regions(self) -> pl.DataFrame:
        """Calls of compiled code (`analysis/compiler/compiled_regions.py`)."""
        return self.within(compiled_regions(self.linked))

    # -- what a change saves --------------------------------------------------------------------------------------

    @cached_property
    def overhead(self) -> Overhead:
        """What the profiler adds to host time, fitted to the clean step time if it is known."""
        return self.replay.usual_overhead if self.clean_ns is None else self.replay.overhead_at(self.clean_ns)

    @cached_property
    def step(self) -> Replayed:
        """A typical step without the profiler, replayed."""
        return self.replay.play(Change(overhead=self.overhead))

    @property
    def step_ns(self) -> float:
        """The time of a step without the profiler: measured, otherwise replayed."""
        return self.step.done_ns if self.clean_ns is None else self.clean_ns

    @cached_property
    def _beside_ns(self) -> tuple[float, float]:
        return beside_ns(self.summary.loop if self.has_recording else None, self.step_ns)

    @property
    def average_ns(self) -> float:
        """The time per step with slow steps and what lies between steps: shares are of this."""
        return self.step_ns + sum(self._beside_ns)

    @cached_property
    def starved_ns(self) -> float:
        """How long the GPU has no launched work per step, without the profiler: the most that a faster host saves."""
        held = self.idle.filter(pl.col("cause").cast(pl.String).is_in(["queued", "unknown"]))
        return max(0.0, self.step.done_ns - self.busy_ns - length_ns(held) / self.num_steps)

    def saving_ns(self, change: Change) -> Saving:
        """Return what a change saves per step."""
        has_host = change.host is not None and change.host.height
        if not (has_host or change.duration_ns or change.gone or change.unwaited):
            return Saving(0.0, change)
        if self.is_on_cpu:
            shorter_ns = sum(self._duration_ns[event] - ns for event, ns in change.duration_ns.items())
            less_ns = spared_ns(change) * self.clean_share + shorter_ns
            return Saving(max(0.0, less_ns / self.num_steps), change)
        changed = self.replay.play(replace(change, overhead=self.overhead))
        return Saving(max(0.0, self.step.done_ns - changed.done_ns), change)

    def is_worth(self, saving_ns: float) -> bool:
        return saving_ns > 0 and saving_ns >= (WORTH_WITHOUT_GPU if self.is_on_cpu else WORTH_SHARE) * self.step_ns

    def host_saving_ns(self, spans: pl.DataFrame) -> Saving:
        """Return what a step saves without some spans of host time."""
        return self.saving_ns(Change(host=stretches(spans)))

    def without(
        self, events: Iterable[int], durations_ns: Mapping[int, float] | None = None, is_loop: bool = False
    ) -> Change:
        """Return the change that removes some GPU work and the host time for it; other work takes `durations_ns`."""
        return replace(without(self._worked, events, is_loop), duration_ns=durations_ns or {})

    def scaled_to(self, total_ns: float, events: Sequence[int]) -> dict[int, float]:
        """Return the duration of each piece of work, by event, if all of it takes `total_ns`."""
        factor = total_ns / max(1, sum(self._duration_ns[event] for event in events))
        return {event: self._duration_ns[event] * factor for event in events}

    @cached_property
    def _duration_ns(self) -> dict[int, int]:
        return dict(self.work.select("event", "duration_ns").iter_rows())

    def places(self, events: Iterable[int]) -> Places:
        """Return where some GPU work is on the timeline, most work first."""
        return places_of_work(self.all_work, self.all_work["event"].is_in(list(events)))

    host_places = staticmethod(places_of_stretches)
