"""The lines of an analysis that say one thing each: launches, copies, limits, waits, memory, what is missing."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from stepscope.analysis.ranks.all_ranks import AcrossRanks, Analysis
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.formatting import average, duration, percent, plural, safe, size

_COLUMN = 13


def fact_lines(analysis: Analysis) -> list[str]:
    """Every line for a terminal."""
    return [f"{title:<{_COLUMN}}{safe(text, 400)}" for title, text in facts_of(analysis)]


def facts_of(analysis: Analysis) -> list[tuple[str, str]]:
    """What each line is about and what it says, the ranks' first, warnings last."""
    first = analysis.ranks[0]
    return [
        *_waits(analysis),
        *_launches(first),
        *_copies(first),
        *limit_facts(first),
        *_syncs(first),
        *_memory(first),
        *_unlinked(first),
        *_warnings(analysis),
    ]


def work_facts(account: RankAccount) -> Iterator[tuple[str, str]]:
    """Of a rank's launches, copies and waits, and what could not be linked: what each is about, and the sentence."""
    for facts in (_launches, _copies, _syncs, _unlinked):
        yield from facts(account)


def _waits(analysis: Analysis) -> Iterator[tuple[str, str]]:
    if analysis.across is None:
        return
    ranks, calls = analysis.across.stragglers.ranks, analysis.across.stragglers.calls
    if calls.height:
        waiting, moving = int(ranks["wait_ns"].sum()), int(ranks["transfer_ns"].sum())
        worst = ranks.sort("caused_wait_ns", "rank", descending=[True, False]).row(0, named=True)
        share = percent(waiting / max(1, waiting + moving))
        yield (
            "waiting",
            f"{share} of the time in matched collectives is waiting for the last rank; rank {worst['rank']} is last "
            f"in {worst['num_last']} of {calls.height}",
        )
    yield "clocks", _clocks(analysis.across)
    lost = analysis.across.matched.unlinked
    if lost.num:
        yield "not matched", f"{percent(lost.share)} of collectives across ranks"


def _clocks(across: AcrossRanks) -> str:
    offsets = across.clocks.offsets
    tied = offsets.filter(pl.col("rank") != pl.col("reference"))
    if tied.is_empty():
        return "not aligned: no collective is in the traces of two ranks"
    widest = duration(int(tied["uncertainty_ns"].max()), 3)  # type: ignore[arg-type]
    others = offsets.filter(pl.col("reference") != offsets["reference"].min())["rank"].to_list()
    apart = f"; not with these: rank {', '.join(map(str, others))}" if others else ""
    return f"aligned on collectives to ±{widest}{apart}"


def _launches(account: RankAccount) -> Iterator[tuple[str, str]]:
    found = account.launches
    if not found["num_kernels"]:
        return
    per_step = found["num_kernel_launches_per_step"]
    if per_step is None:
        text = plural(int(found["num_kernels"]), "kernel")
    else:
        text = f"{average(per_step)} kernel{'' if per_step == 1 else 's'} a step"
    if found["num_unlaunched_kernels"]:
        more = "of them" if per_step is None else "more"
        text += f", {found['num_unlaunched_kernels']:,} {more} without a launch in the trace"
    if found["num_graph_kernels"]:
        replays = plural(int(found["num_graph_launches"] or 0), "graph replay")
        text += f", {found['num_graph_kernels']:,} of all by {replays}"
    if found["latency_p50_ns"] is not None:
        median, slow = duration(found["latency_p50_ns"], 3), duration(found["latency_p99_ns"] or 0, 3)
        text += f"; launch to start {median} (p99 {slow})"
        text += f"; queue empty at {percent(found['starved_share'] or 0.0)} of launches"
    yield "launches", text


def _copies(account: RankAccount) -> Iterator[tuple[str, str]]:
    # As in the table of kernels: of the sum of all durations.
    work = int(account.kernel_classes["total_ns"].sum())
    copies = account.copies.group_by("what").agg(pl.col("total_ns").sum()).sort("total_ns", descending=True)
    if copies.height and work:
        shares = [f"{str(what).replace('_', ' ')} {percent(ns / work)}" for what, ns in copies.head(4).iter_rows()]
        yield "copies", f"{percent(int(copies['total_ns'].sum()) / work)} of GPU work: {', '.join(shares)}"


def limit_facts(account: RankAccount) -> Iterator[tuple[str, str]]:
    """What the GPU's work is limited by, where the device is known."""
    found = account.roofline_summary
    if found.limit_share is None:
        return
    parts = {"compute": found.compute_ns, "memory": found.memory_ns, "neither": found.neither_ns}
    shares = [f"{name} {percent(ns / max(1, found.total_ns))}" for name, ns in parts.items()]
    unknown = percent(found.unknown_ns / max(1, found.total_ns))
    yield (
        "limited by",
        f"{', '.join(shares)}, not known {unknown}, of {duration(found.total_ns)}: GPU work without communication "
        f"and copies to and from the host; what is known runs at {percent(found.limit_share)} of its limit",
    )


def _syncs(account: RankAccount) -> Iterator[tuple[str, str]]:
    waits = account.syncs.filter(pl.col("kind") == "host_wait")
    if waits.is_empty():
        return
    most = waits.row(0, named=True)
    idle = int(waits["idle_after_ns"].sum())
    text = f"{plural(int(waits['num_calls'].sum()), 'wait')} of the host for the GPU"
    if idle:
        where = f" in {most['op']}" if most["op"] else ""
        text += (
            f"; with nothing queued after them the GPU then stood idle for {duration(idle)}, whatever the host did "
            f"by then; longest after {most['call']}{where}"
        )
    yield "syncs", text


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
    for text in analysis.warnings:
        yield "warning", text
