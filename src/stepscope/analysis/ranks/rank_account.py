"""One rank's trace as tables, the accounts of all ranks of a job, and what `stepscope analyze --json` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from stepscope.analysis.costs.roofline import RooflineSummary, roofline, roofline_summary
from stepscope.analysis.kernels import kernels
from stepscope.analysis.kernels.copies import copies, copies_summary
from stepscope.analysis.kernels.ops import modules, ops
from stepscope.analysis.memory.allocator_events import MemorySummary, memory_summary, memory_timeline
from stepscope.analysis.ranks import side_by_side
from stepscope.analysis.ranks.collectives import collectives, collectives_by_size
from stepscope.analysis.ranks.network import transfers
from stepscope.analysis.ranks.streamed_json import plain, text_of
from stepscope.analysis.structure.intervals import last_covering, spans, sweep
from stepscope.analysis.structure.links import Linked, Share, link
from stepscope.analysis.structure.once import once
from stepscope.analysis.structure.steps import Steps, at_times
from stepscope.analysis.time.gpu_time import GpuTime, gpu_time
from stepscope.analysis.time.idle_causes import idle_causes, idle_gaps
from stepscope.analysis.time.longest_gaps import longest_gaps
from stepscope.analysis.time.phases import PHASES
from stepscope.analysis.time.syncs import syncs, syncs_summary
from stepscope.border import limit
from stepscope.display import Shown
from stepscope.errors import UsageError
from stepscope.trace.assemble import nest
from stepscope.trace.scan import Problem
from stepscope.trace.tables import Trace


@dataclass(frozen=True)
class RankAccount:
    """Where the time of one rank goes."""

    rank: int
    path: str
    device_name: str | None
    base_time_ns: int
    num_events: int
    is_cut_off: bool
    """Whether the file ends before its list of events. GPU events are written last, so they may be missing."""
    step_source: str
    phase_source: str
    module_source: str
    gpu_time: GpuTime
    gpu_time_by_device: dict[int, GpuTime]  # one entry per device if the process used several
    steps: pl.DataFrame
    phases: pl.DataFrame
    idle_causes: pl.DataFrame
    longest_gaps: pl.DataFrame
    kernel_classes: pl.DataFrame
    top_kernels: pl.DataFrame
    gemm_share: pl.DataFrame
    kernel_sizes: pl.DataFrame
    launches: dict[str, float | int | None]
    queue_depth: pl.DataFrame
    ops: pl.DataFrame
    modules: pl.DataFrame
    copies: pl.DataFrame
    roofline: pl.DataFrame
    roofline_summary: RooflineSummary
    memory: tuple[MemorySummary, ...]
    memory_timeline: pl.DataFrame  # of the device with the highest peak
    syncs: pl.DataFrame
    collectives: pl.DataFrame  # one row per communication kernel
    unlinked: dict[str, Share]
    counts: pl.DataFrame
    warnings: tuple[str, ...]


def account(trace: Trace, rank: int, step: int | None = None) -> RankAccount:
    return account_of(link(trace), rank, step)


def last_account(trace: Trace, rank: int, step: int | None = None) -> RankAccount:
    """Return the account of a trace, and drop the rest of the trace to save memory."""
    kernel = ("grid", "block", "registers_per_thread", "shared_memory_bytes", "occupancy_percent")
    _drop(trace.host, "record_function", "stack")
    _drop(trace.device, *kernel)
    linked = link(trace)
    if step is None:  # these are only for links
        for table in (trace.host, linked.host):
            _drop(table, "external_id", "sequence", "forward_thread")
        for table in (trace.device, trace.memory):
            _drop(table, *table.columns)
    return account_of(linked, rank, step)


def _drop(table: pl.DataFrame, *names: str) -> None:
    for name in names:
        table.drop_in_place(name)


def account_of(linked: Linked, rank: int, step: int | None = None) -> RankAccount:
    trace = linked.trace
    if step is not None:
        if step not in linked.steps.table["step"]:
            raise UsageError(f"{trace.path}: no step {step}; {_which(linked.steps)}")
        only = replace(linked.steps, table=linked.steps.table.filter(pl.col("step") == step))
        linked = link(one_step(linked, step), only)
    device, time = linked.device, gpu_time(linked.device)
    # What needs most memory, ops, idle gaps and syncs, is far apart.
    parts: dict[str, Callable[[], Any]] = {
        "ops": lambda: ops(linked),
        "memory": lambda: memory_summary(linked),
        "gpu_time_by_device": lambda: gpu_time_by_device(device),
        "steps": lambda: step_table(linked),
        "phases": lambda: phase_table(linked),
        "roofline": lambda: roofline_of(linked),
        "copies": lambda: copies_summary(copies(linked), linked.steps.num, time.busy_ns),
        "launches": lambda: kernels.launches(linked),
        "idle_causes": lambda: idle_causes(idle_gaps(linked)),
        "modules": lambda: modules(linked),
        "collectives": lambda: collectives(linked),
        "queue_depth": lambda: kernels.queue_depth_over_time(linked),
        "kernel_classes": lambda: kernels.kernel_classes(device),
        "top_kernels": lambda: kernels.top_kernels(device),
        "gemm_share": lambda: kernels.gemm_share_by_phase(device),
        "kernel_sizes": lambda: kernels.kernel_sizes(device),
        "syncs": lambda: syncs_summary(syncs(linked), linked.steps.num),
    }
    # Each depends only on the links. Polars releases the GIL, so two at a time use two cores, if it may.
    with ThreadPoolExecutor(min(2, pl.thread_pool_size())) as pool:
        futures = {name: pool.submit(part) for name, part in parts.items()}
        done = {name: future.result() for name, future in futures.items()}
    kind, index = next(((each.device_type, each.device) for each in done["memory"]), ("cuda", None))
    done["memory_timeline"] = memory_timeline(linked, kind, index, max_points=200)
    done["longest_gaps"] = longest_gaps(linked, idle_gaps(linked))
    return RankAccount(
        rank=rank,
        path=str(trace.path),
        device_name=device_name(linked),
        base_time_ns=trace.facts.base_time_ns,
        num_events=trace.num_events,
        is_cut_off=trace.facts.is_cut_off,
        step_source=linked.steps.source,
        phase_source=linked.steps.phase_source,
        module_source=linked.modules.source,
        gpu_time=time,
        roofline_summary=roofline_summary(done["roofline"]),
        unlinked=linked.unlinked,
        counts=trace.counts,
        warnings=warnings_of(linked),
        **done,
    )


@once
def roofline_of(linked: Linked) -> pl.DataFrame:
    return roofline(linked, device_name(linked))


def warnings_of(linked: Linked) -> tuple[str, ...]:
    """Return the problems with a trace."""
    trace = linked.trace
    return (*trace.warnings, *map(_problem, trace.problems), *_too_many_devices(linked))


def _which(steps: Steps) -> str:
    if not steps.num:
        return "the trace does not mark where steps end"
    numbers = steps.table["step"].to_list()
    if len(numbers) == 1:
        return f"the trace has only step {numbers[0]}"
    return f"the trace has {min(numbers)} to {max(numbers)}"


def _problem(problem: Problem) -> str:
    """Return a problem with some events as a sentence; `what` describes each of them."""
    if problem.what == "not an event":
        what = "1 entry that is not an event" if problem.num == 1 else f"{problem.num:,} entries that are not events"
    else:
        what = f"{'1 event' if problem.num == 1 else f'{problem.num:,} events'} {problem.what}"
    return f"{what} ({'at' if problem.num == 1 else 'the first at'} byte {problem.offset:,})"


def gpu_time_by_device(device: pl.DataFrame) -> dict[int, GpuTime]:
    """Return the account of each device, of too many those with most events; empty if there is only one."""
    counts = device["device"].drop_nulls().value_counts().sort("count", "device", descending=[True, False])
    chosen = counts["device"].head(limit("DEVICES")).sort()
    return {i: gpu_time(device.filter(pl.col("device") == i)) for i in chosen if counts.height > 1}


def _too_many_devices(linked: Linked) -> Iterator[str]:
    most = limit("DEVICES")
    counts = {"GPUs": linked.device["device"].drop_nulls().n_unique(),
              "devices with [memory] events": linked.memory.select("device_type", "device").n_unique()}  # fmt: skip
    for what, num in counts.items():
        if num > most:
            yield f"of {num:,} {what}, only {most} are listed one by one: set STEPSCOPE_MAX_DEVICES to list more"


def device_name(linked: Linked) -> str | None:
    """Return the name of the device that did most of the work, from the trace."""
    names = linked.trace.facts.devices
    used = linked.device["device"].drop_nulls().mode().sort()
    index = int(used[0]) if len(used) else 0
    return names[index] if 0 <= index < len(names) else None


def one_step(linked: Linked, step: int) -> Trace:
    """Return the trace of one step: host events that start in it and the GPU work they launched."""
    trace = linked.trace
    syncs = at_times(trace.syncs, linked.steps, "start_ns")
    tables = {"host": linked.host, "device": linked.device, "memory": linked.memory, "syncs": syncs}
    kept = {}
    for name, table in tables.items():
        events = table.filter(pl.col("step") == step)["event"]
        kept[name] = getattr(trace, name).filter(pl.col("event").is_in(events.implode()))
    return replace(trace, **{**kept, "host": nest(kept["host"])})


def step_table(linked: Linked) -> pl.DataFrame:
    """Return steps: `step`, `start_ns`, `duration_ns`, `num_kernels` launched, and `gpu_busy_ns` while the step
    lasted."""
    steps = linked.steps.table
    length = pl.col("end_ns") - pl.col("start_ns")
    launched = linked.device.select("step").filter(linked.device["kind"] == "kernel").group_by("step")
    busy = sweep({"busy": spans(linked.device), "within": steps}, cuts=steps["start_ns"]).filter("busy", "within")
    owned = busy.join_asof(steps.select("step", "start_ns"), on="start_ns", check_sortedness=False).group_by("step")
    table = steps.select("step", "start_ns", length.alias("duration_ns"))
    num_kernels, busy_ns = pl.len().cast(pl.Int64).alias("num_kernels"), length.sum().alias("gpu_busy_ns")
    for part in (launched.agg(num_kernels), owned.agg(busy_ns)):
        table = table.join(part, on="step", how="left", maintain_order="left")
    return table.with_columns(pl.col("num_kernels", "gpu_busy_ns").fill_null(0))


def phase_table(linked: Linked) -> pl.DataFrame:
    """Return host and GPU time by phase: `host_ns`, `host_share`, `device_ns`, `num_kernels`.

    With steps, host time is that of the steps; without, all of it. The last row, `unattributed`, is GPU work of no
    phase (`device_phases`); with it, `device_ns` adds up to the busy time.
    """
    phases = linked.steps.phases
    if linked.steps.num and not phases.is_empty():
        host = sweep({"step": linked.steps.table, **{p: phases.filter(pl.col("phase") == p) for p in PHASES}})
        # Before the first and after the last host event, the phase is `other`.
        host = host.filter("step").with_columns(last_covering(PHASES, "other").alias("phase"))
    else:
        host = phases.with_columns(pl.col("phase").cast(pl.String))
    sums = host.group_by("phase").agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("host_ns"))
    table = kernels.device_phases(linked).rename({"busy_ns": "device_ns"})
    table = table.join(sums, on="phase", how="left", maintain_order="left")
    table = table.with_columns(pl.col("host_ns").fill_null(0))
    share = pl.col("host_ns") / pl.col("host_ns").sum().clip(1)
    return table.select("phase", "host_ns", share.alias("host_share"), "device_ns", "num_kernels")


SCHEMA_VERSION = 1
NUM_ROWS = 8  # default number of rows in lists of names on a terminal
_ALL = 2**32


@dataclass(frozen=True)
class RankSummary:
    """The part of a rank's account that is needed of every rank at once: a few KiB."""

    rank: int
    path: str
    num_events: int
    num_steps: int
    base_time_ns: int
    gpu_time: GpuTime
    host_ns: dict[str, float]  # by phase; per step if there are steps
    collectives: pl.DataFrame  # each text of it once, as a category
    warnings: tuple[str, ...]


def summary_of_rank(account: RankAccount) -> RankSummary:
    num_steps = account.steps.height
    return RankSummary(
        account.rank,
        account.path,
        account.num_events,
        num_steps,
        account.base_time_ns,
        account.gpu_time,
        {phase: ns / max(1, num_steps) for phase, ns in account.phases.select("phase", "host_ns").iter_rows()},
        # The text of a group lists its ranks: with a thousand, several KiB for each call.
        account.collectives.with_columns(pl.col(pl.String).cast(pl.Categorical)),
        account.warnings,
    )


@dataclass(frozen=True, repr=False)
class Analysis(Shown):
    """Every rank's account, and how the ranks affect each other."""

    ranks: Sequence[RankAccount]  # by rank; of many, all but the first few are read from a file when asked for
    summaries: tuple[RankSummary, ...]
    across: AcrossRanks | None  # none for a single rank

    @classmethod
    def of(cls, accounts: Sequence[RankAccount], summaries: Sequence[RankSummary] = ()) -> Analysis:
        """Return the analysis of ranks from their accounts; with summaries, the accounts are in order."""
        ordered = accounts if summaries else sorted(accounts, key=lambda account: account.rank)
        every = tuple(summaries) or tuple(map(summary_of_rank, ordered))
        return cls(ordered, every, across_ranks(every) if len(every) > 1 else None)

    @property
    def warnings(self) -> list[str]:
        """Problems with the files; with several ranks, each names its rank, or says that every rank has it."""
        ranks = self.summaries
        if len(ranks) == 1:
            return list(ranks[0].warnings)
        shared = set.intersection(*(set(rank.warnings) for rank in ranks))
        own = [f"rank {rank.rank}: {text}" for rank in ranks for text in rank.warnings if text not in shared]
        return [*own, *(f"every rank: {text}" for text in ranks[0].warnings if text in shared)]

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Return one object of plain values, with at most `most` rows in lists of names (docs/analyze.md)."""
        return dict(plain(self._tree(most)))

    def json_text(self, most: int | None = None) -> Iterator[str]:
        """Yield the JSON of `to_json` in pieces, one rank in memory at a time."""
        return text_of(self._tree(most))

    def _tree(self, most: int | None) -> dict[str, Any]:
        first, limit = self.ranks[0], _ALL if most is None else most
        return {
            "schema_version": SCHEMA_VERSION,
            "trace": {
                "device": first.device_name,
                "ranks": [rank.rank for rank in self.summaries],
                "events": sum(rank.num_events for rank in self.summaries),
                "steps": max(rank.num_steps for rank in self.summaries),
                "warnings": self.warnings,
            },
            "ranks": (_rank_json(rank, limit) for rank in self.ranks),
            "across_ranks": _across_json(self.across, limit) if self.across else None,
        }


@dataclass(frozen=True)
class AcrossRanks:
    """Collectives that several ranks took part in."""

    matched: side_by_side.Matched
    clocks: pl.DataFrame  # each rank's clock offset (`side_by_side.clock_alignment`)
    stragglers: side_by_side.Stragglers
    table: pl.DataFrame  # each rank's GPU time side by side


def across_ranks(accounts: Sequence[RankSummary]) -> AcrossRanks:
    matched = side_by_side.match_collectives({account.rank: account.collectives for account in accounts})
    clocks = side_by_side.clock_alignment(matched, {account.rank: account.base_time_ns for account in accounts})
    table = side_by_side.rank_table({account.rank: account.gpu_time for account in accounts})
    return AcrossRanks(matched, clocks, side_by_side.stragglers(matched, clocks), table)


def _across_json(across: AcrossRanks, most: int) -> dict[str, Any]:
    return {
        "gpu_time": across.table,
        "unmatched_collectives": across.matched.unlinked.to_json(),
        "unmatched_reasons": across.matched.unmatched,
        "clocks": across.clocks,
        "stragglers": across.stragglers.ranks,
        "num_clamped": across.stragglers.num_clamped,
        "waits": across.stragglers.pairs.head(most),
        "transfers": transfers(across.stragglers).head(most),
        "collectives": across.stragglers.calls.sort("wait_ns", descending=True).head(most),
    }


def _rank_json(rank: RankAccount, most: int) -> dict[str, Any]:
    whole = ("steps", "phases", "idle_causes", "kernel_classes", "gemm_share", "kernel_sizes", "queue_depth")
    names = ("longest_gaps", "top_kernels", "ops", "modules", "copies", "syncs")
    return {
        "rank": rank.rank,
        "file": rank.path,
        "device": rank.device_name,
        "events": rank.num_events,
        **{name: getattr(rank, name) for name in ("is_cut_off", "step_source", "phase_source", "module_source")},
        "gpu_time": rank.gpu_time.to_json(),
        "gpu_time_by_device": {str(index): time.to_json() for index, time in rank.gpu_time_by_device.items()},
        **{name: getattr(rank, name) for name in whole},
        **{name: getattr(rank, name).head(most) for name in names},
        "num_kernel_launches_per_step": rank.launches["num_kernel_launches_per_step"],
        "launches": rank.launches,
        "roofline": {**rank.roofline_summary.to_json(), "ops": rank.roofline.head(most)},
        "memory": [summary.to_json() for summary in rank.memory],
        "memory_timeline": rank.memory_timeline,
        "collectives": collectives_by_size(rank.collectives).head(most),
        "unlinked": {name: share.to_json() for name, share in rank.unlinked.items()},
        "events_by_category": rank.counts,
    }
