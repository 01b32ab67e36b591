"""Facts of an analysis, one line each: launches, copies, limits, synchronization, memory, what is missing."""

from collections.abc import Iterator

import polars as pl

from stepscope.analysis.ranks.network import SLOW, transfers
from stepscope.analysis.ranks.rank_account import AcrossRanks, Analysis, RankAccount
from stepscope.document.kernel_names import short_name
from stepscope.document.model import Fact
from stepscope.formatting import average, duration, percent, plural, safe, shortened, size

_MOST_COPIES = 4
_UNLINKED = {
    "kernel_to_launch": "kernels to a launch", "launch_to_op": "launches to an op",
    "kernel_to_op": "kernels to an op", "backward_to_forward": "backward ops to a forward op",
    "memory_to_op": "memory events to an op", "event_to_step": "GPU events to a step",
    "kernel_to_module": "kernels to a module",
}  # fmt: skip


def trace_facts(analysis: Analysis) -> Iterator[Fact]:
    """Yield the facts of an analysis: about the ranks, then about the first rank."""
    first = analysis.ranks[0]
    if analysis.across is not None:
        yield from rank_facts(analysis.across)
    yield from work_facts(first)
    yield from limit_facts(first)
    for memory in first.memory[:1]:
        least = "" if memory.is_start_known else "at least "
        reserved = f", {size(memory.peak_reserved_bytes)} reserved" if memory.peak_reserved_bytes else ""
        places = [place for place in (memory.peak_phase, memory.peak_module, memory.peak_op) if place]
        where = f"reached by {safe(' '.join(places))}" if places else ""
        yield Fact("memory", f"peak {least}{size(memory.peak_allocated_bytes)} allocated{reserved}", where)


def not_attributed(analysis: Analysis) -> Iterator[Fact]:
    """Yield what the first rank's trace could not attribute."""
    unlinked = analysis.ranks[0].unlinked
    if missing := [f"{percent(one.share)} of {_UNLINKED[name]}" for name, one in unlinked.items() if one.num]:
        yield Fact("not attributed", ", ".join(missing))


def warnings(analysis: Analysis) -> Iterator[Fact]:
    """Yield what was wrong with the files, which whoever reads the figures has to know."""
    yield from (Fact("warning", safe(text, 400)) for text in analysis.warnings)


def rank_facts(across: AcrossRanks) -> Iterator[Fact]:
    """Yield who waits for whom in collectives, and how well the clocks of the ranks are aligned."""
    ranks, calls = across.stragglers.ranks, across.stragglers.calls
    if calls.height:
        waiting, moving = int(ranks["wait_ns"].sum()), int(ranks["transfer_ns"].sum())
        worst = ranks.sort("caused_wait_ns", "rank", descending=[True, False]).row(0, named=True)
        share = percent(waiting / max(1, waiting + moving))
        last = f"rank {worst['rank']} is last in {worst['num_last']} of {calls.height}"
        yield Fact("waiting", f"{share} of the time in matched collectives is waiting for the last rank; {last}")
    if (groups := transfers(across.stragglers)).height and groups["num_slow"][0]:
        slow = groups.row(0, named=True)
        which = f"{plural(slow['num_calls'], slow['collective'] + ' call')} of {size(slow['bytes'])}"
        took = f"take {SLOW} times their usual {duration(slow['usual_ns'], 3)} or more after the last rank has come"
        yield Fact("network", f"{slow['num_slow']} of {which} among ranks {safe(slow['members'], 40)} {took}")
    yield Fact("clocks", _clocks(across))
    if across.matched.unlinked.num:
        yield Fact("not matched", f"{percent(across.matched.unlinked.share)} of collectives across ranks")


def _clocks(across: AcrossRanks) -> str:
    offsets = across.clocks
    tied = offsets.filter(pl.col("rank") != pl.col("reference"))
    if tied.is_empty():
        return "not aligned: no kernel of NCCL or RCCL is in the traces of two ranks"
    widest = duration(int(tied["uncertainty_ns"].max()), 3)  # type: ignore[arg-type]  # numbers
    others = offsets.filter(pl.col("reference") != offsets["reference"].min())["rank"].to_list()
    apart = f", except rank {', '.join(map(str, others))}" if others else ""
    return f"aligned on collectives to ±{widest}{apart}"


def work_facts(account: RankAccount) -> Iterator[Fact]:
    """Yield how one rank's GPU was fed: launches, copies, synchronization, the longest idle gap."""
    yield from _launches(account)
    # Shares as in the table of kernels: of the sum of all durations.
    work = int(account.kernel_classes["total_ns"].sum())
    copies = account.copies.group_by("what").agg(pl.col("total_ns").sum()).sort("total_ns", descending=True)
    if copies.height and work:
        shares = [f"{what.replace('_', ' ')} {percent(ns / work)}" for what, ns in copies.head(_MOST_COPIES).rows()]
        yield Fact("copies", f"{percent(int(copies['total_ns'].sum()) / work)} of GPU work: {', '.join(shares)}")
    time = account.gpu_time
    if time.communication_ns:
        overlapped = percent(time.overlapped_communication_ns / time.communication_ns)
        yield Fact("communication", f"{duration(time.communication_ns)}, {overlapped} of it overlapped by compute")
    for index, other in account.gpu_time_by_device.items():
        busy = percent(other.busy_ns / max(1, other.window_ns))
        yield Fact(f"device {index}", f"busy {busy} of {duration(other.window_ns)}")
    yield from _syncs(account)
    for gap in account.longest_gaps.head(1).iter_rows(named=True):
        inside = f"in {shortened(safe(gap['host'], 1000), 60, 0.25)}, " if gap["host"] else ""
        before = shortened(short_name(safe(gap["next_kernel"] or "?", 1000), 1000), 40)
        yield Fact("longest idle gap", f"{duration(gap['duration_ns'])} ({gap['cause']})", f"{inside}before {before}")


def _launches(account: RankAccount) -> Iterator[Fact]:
    found = account.launches
    if not found["num_kernels"]:
        return
    text, more = plural(int(found["num_kernels"]), "kernel"), "of them"
    if (per_step := found["num_kernel_launches_per_step"]) is not None:
        text, more = f"{average(per_step)} kernel{'' if per_step == 1 else 's'} per step", "more"
    if found["num_unlaunched_kernels"]:
        text += f", {found['num_unlaunched_kernels']:,} {more} without a launch in the trace"
    if found["num_graph_kernels"]:
        replays = plural(int(found["num_graph_launches"] or 0), "graph replay")
        text += f", {found['num_graph_kernels']:,} of all by {replays}"
    detail = ""
    if found["latency_p50_ns"] is not None:
        median, slow = duration(found["latency_p50_ns"], 3), duration(found["latency_p99_ns"] or 0, 3)
        empty = percent(found["starved_share"] or 0.0)
        detail = f"launch to start {median} (p99 {slow}); queue empty at {empty} of launches"
    yield Fact("launches", text, detail)


def limit_facts(account: RankAccount) -> Iterator[Fact]:
    found = account.roofline_summary
    if found.limit_share is None:
        return
    parts = {name: getattr(found, f"{name}_ns") for name in ("compute", "memory", "neither", "unknown")}
    shares = ", ".join(f"{name} {percent(ns / max(1, found.total_ns))}" for name, ns in parts.items())
    reached = f"on average, kernels run at {percent(found.limit_share)} of the hardware limit"
    detail = f"GPU work without communication and host copies; {reached}"
    yield Fact("limited by", f"{shares} of {duration(found.total_ns)}", detail)


def _syncs(account: RankAccount) -> Iterator[Fact]:
    waits = account.syncs.filter(pl.col("kind") == "host_wait")
    if waits.is_empty():
        return
    text, detail = f"the host waits for the GPU {plural(int(waits['num_calls'].sum()), 'time')}", ""
    if idle := int(waits["idle_after_ns"].sum()):
        most = waits.row(0, named=True)
        where = f" in {safe(most['op'])}" if most["op"] else ""
        text += f", which leaves it idle for {duration(idle)}"
        detail = f"nothing was queued; longest after {safe(most['call'])}{where}"
    yield Fact("synchronization", text, detail)
