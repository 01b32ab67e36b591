"""The lines of an analysis that say one thing each: launches, copies, limits, waits, memory, what is missing."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from stepscope.analysis.rank import RankAccount
from stepscope.analysis.traces import Analysis
from stepscope.report.text import microseconds, milliseconds, percent, plural, safe, significant, size

_COLUMN = 13


def fact_lines(analysis: Analysis) -> list[str]:
    """Every line, the ranks' first, warnings last."""
    first = analysis.ranks[0]
    facts = [
        *_waits(analysis),
        *_launches(first),
        *_copies(first),
        *_limits(first),
        *_syncs(first),
        *_memory(first),
        *_unlinked(first),
        *_warnings(analysis),
    ]
    return [f"{title:<{_COLUMN}}{safe(text, 400)}" for title, text in facts]


def _waits(analysis: Analysis) -> Iterator[tuple[str, str]]:
    if analysis.across is None or analysis.across.stragglers.ranks.is_empty():
        return
    ranks, calls = analysis.across.stragglers.ranks, analysis.across.stragglers.calls
    waiting, moving = int(ranks["wait_ns"].sum()), int(ranks["transfer_ns"].sum())
    worst = ranks.sort("caused_wait_ns", "rank", descending=[True, False]).row(0, named=True)
    share = percent(waiting / max(1, waiting + moving))
    yield (
        "waiting",
        (
            f"{share} of collective time is waiting for the last rank; rank {worst['rank']} is last in "
            f"{worst['num_last']} of {calls.height}"
        ),
    )
    widest = max((ns for ns in analysis.across.clocks.offsets["uncertainty_ns"] if ns is not None), default=0)
    yield "clocks", f"aligned on collectives to ±{microseconds(widest)}"
    lost = analysis.across.matched.unlinked
    if lost.num:
        yield "not matched", f"{percent(lost.share)} of collectives across ranks"


def _launches(account: RankAccount) -> Iterator[tuple[str, str]]:
    found = account.launches
    if not found["num_kernels"]:
        return
    per_step = found["num_kernel_launches_per_step"]
    text = f"{found['num_kernels']:,} kernels" if per_step is None else f"{significant(per_step, 4)} kernels a step"
    if found["num_graph_kernels"]:
        replays = plural(int(found["num_graph_launches"] or 0), "graph replay")
        text += f", {found['num_graph_kernels']:,} of all by {replays}"
    if found["latency_p50_ns"] is not None:
        median, slow = microseconds(found["latency_p50_ns"]), microseconds(found["latency_p99_ns"] or 0)
        text += f"; launch to start {median} (p99 {slow})"
        text += f"; queue empty at {percent(found['starved_share'] or 0.0)} of launches"
    yield "launches", text


def _copies(account: RankAccount) -> Iterator[tuple[str, str]]:
    busy = account.gpu_time.busy_ns
    copies = account.copies.group_by("what").agg(pl.col("total_ns").sum()).sort("total_ns", descending=True)
    if copies.height and busy:
        shares = [f"{str(what).replace('_', ' ')} {percent(ns / busy)}" for what, ns in copies.head(4).iter_rows()]
        yield "copies", f"{percent(int(copies['total_ns'].sum()) / busy)} of GPU work: {', '.join(shares)}"


def _limits(account: RankAccount) -> Iterator[tuple[str, str]]:
    found = account.roofline_summary
    if found.limit_share is None:
        return
    parts = {"compute": found.compute_ns, "memory": found.memory_ns, "neither": found.neither_ns}
    shares = [f"{name} {percent(ns / max(1, found.total_ns))}" for name, ns in parts.items()]
    unknown = percent(found.unknown_ns / max(1, found.total_ns))
    yield "limited by", f"{', '.join(shares)}, not known {unknown}; at {percent(found.limit_share)} of the limit"


def _syncs(account: RankAccount) -> Iterator[tuple[str, str]]:
    for row in account.syncs.head(1).iter_rows(named=True):
        where = f" in {row['op']}" if row["op"] else ""
        num = plural(int(account.syncs["num_calls"].sum()), "wait")
        cost = milliseconds(int(account.syncs["idle_after_ns"].sum()))
        yield "syncs", f"{num} for the GPU, {cost} of it idle after them; most after {row['call']}{where}"


def _memory(account: RankAccount) -> Iterator[tuple[str, str]]:
    for memory in account.memory[:1]:
        least = "" if memory.is_start_known else "at least "
        reserved = f", {size(memory.peak_reserved_bytes)} reserved" if memory.peak_reserved_bytes else ""
        places = [place for place in (memory.peak_phase, memory.peak_module, memory.peak_op) if place]
        where = f"; made by {' '.join(places)}" if places else ""
        yield "memory", f"peak {least}{size(memory.peak_allocated_bytes)} allocated{reserved}{where}"


def _unlinked(account: RankAccount) -> Iterator[tuple[str, str]]:
    shares = account.unlinked.items()
    missing = [f"{name.replace('_', ' ')} {percent(share.share)}" for name, share in shares if share.num]
    if missing:
        yield "not linked", ", ".join(missing)


def _warnings(analysis: Analysis) -> Iterator[tuple[str, str]]:
    for rank in analysis.ranks:
        for text in rank.warnings:
            yield "warning", (f"rank {rank.rank}: " if len(analysis.ranks) > 1 else "") + text
