"""Rules about several ranks: exposed communication, and waiting for the slowest."""

import shlex
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from stepscope.analysis.ranks.collectives import collectives, collectives_by_size
from stepscope.analysis.ranks.network import timed_transfers, transfers
from stepscope.analysis.ranks.rank_account import AcrossRanks, RankSummary
from stepscope.analysis.structure.intervals import length_ns, union
from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.formatting import duration, plural, size, whole_percent
from stepscope.session.rank_times import clean_times

_FIXES = {
    "all_reduce": "DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True); with "
    "model.no_sync(): around all micro-batches but the last",
    "all_gather": "FSDP(…, forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE); with "
    "fully_shard: set_modules_to_forward_prefetch",
    "reduce_scatter": "FSDP(…, backward_prefetch=BackwardPrefetch.BACKWARD_PRE), and wrap larger units",
    "all_to_all": "dist.all_to_all_single(…, async_op=True), and wait() only before its result is used",
}
_WAITING = "cpu_ranks"  # the row of a CPU's ledger
_OF_LATE_RANK = ("cpu_data", "cpu_between", "cpu_outside", "cpu_python", "cpu_products", "cpu_ops")
_SMALL_BYTES = 1 << 20  # smaller messages are limited by latency, not bandwidth


@rule
def communication(case: Case) -> list[Finding]:
    """Do ranks communicate without computing at the same time?"""
    calls = collectives(case.linked)
    if calls.is_empty() and not case.has_gpu_work:
        raise Unavailable("There is neither a kernel of NCCL or RCCL in the trace nor a collective of gloo.")
    is_typical = pl.col("event").is_in(case.replay.events)  # by their launch
    calls = calls.filter(is_typical) if case.has_gpu_work else case.within(calls)
    calls = calls.filter(~pl.col("event").is_in(_reduced_again(case)["event"].implode()))  # by another rule
    if calls.is_empty():
        return []
    calls = calls.join(_waited(case), on="start_ns", how="left").with_columns(pl.col("wait_ns").fill_null(0))
    # A kernel that starts early waits for other ranks first. `stragglers` reports that part.
    own = pl.max_horizontal(pl.col("exposed_ns") - pl.col("wait_ns"), 0).alias("own_ns")
    calls = calls.with_columns(own)
    durations = {
        event: float(duration - part)
        for event, duration, part in calls.select("event", "duration_ns", "own_ns").iter_rows()
    }
    saving_ns = float(calls["own_ns"].sum()) / case.num_steps
    if case.has_gpu_work:
        saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    kinds = calls.group_by("collective").agg(pl.col("own_ns").sum(), pl.len()).sort("own_ns", descending=True)
    worst = str(kinds["collective"][0])
    of_kind = calls.filter(pl.col("collective") == worst)
    sizes = of_kind.drop_nulls("bytes").group_by("bytes").agg(pl.col("own_ns").sum()).sort("own_ns", descending=True)
    small_ns = int(sizes.filter(pl.col("bytes") < _SMALL_BYTES)["own_ns"].sum())
    sizes_text = ""
    if small_ns * 2 > int(of_kind["own_ns"].sum()):
        sizes_text = f", mostly below {size(_SMALL_BYTES)} and thus limited by latency"
    elif sizes.height:
        sizes_text = f", most of the time for {size(sizes['bytes'][0])}"
    is_split = bool(calls["wait_ns"].sum())
    return one_finding(
        sentence=f"Communication that does not overlap with computation takes "
        f"{case.cost_text(case.total_ns(calls, pl.col('own_ns')))}, out of {duration(case.total_ns(calls), 3)} of "
        f"communication in total. Most of it is in "
        f"{plural(of_kind.height / case.num_steps, worst + ' call')} per step{sizes_text}.",
        fix=_FIXES.get(worst, "start it earlier (async_op=True), and wait only before its result is used"),
        saving_ns=saving_ns,
        upper_bound=True,
        rows=() if case.has_gpu_work else (_WAITING,),
        derived=("the step replayed with that part hidden behind computation" if case.has_gpu_work else "that part")
        + ("; the time each call waits for other ranks is excluded" if is_split else
           "; part of it may be waiting for other ranks, which only a folder with every rank's trace shows"),
        confidence="medium" if is_split else "low",
        falsified_by="look for work to overlap; the finding is wrong if all remaining work needs the result",
        places=case.places(calls.filter(pl.col("own_ns") > 0)["event"]),
        evidence=(Evidence("collectives", collectives_by_size(calls).head(8).to_dicts()),),
    )  # fmt: skip


@rule
def repeated_all_reduce(case: Case) -> list[Finding]:
    """Do ranks sum the gradients after each micro-batch, where once before the update is enough?"""
    calls = collectives(case.linked)
    if calls.is_empty():
        raise Unavailable("There is neither a kernel of NCCL or RCCL in the trace nor a collective of gloo.")
    again = _reduced_again(case)
    again = again.filter(pl.col("event").is_in(case.replay.events)) if case.has_gpu_work else case.within(again)
    # Threads of gloo compute on the cores that training needs: all of their time counts.
    saving_ns = float(again["duration_ns"].sum()) / case.num_steps
    if case.has_gpu_work:
        saving_ns = case.saving_ns(Change(gone=frozenset(again["event"])))
    if not case.is_worth(saving_ns):
        return []
    num = again.height / case.num_steps
    passes = plural(again["pass"].n_unique() / case.num_steps + 1, "backward pass", "backward passes")
    return one_finding(
        sentence=f"Gradients are summed over all ranks after each of {passes} before an "
        f"update: {plural(num, 'all_reduce call')} per step could be left out. They take "
        f"{case.cost_text(case.total_ns(again))}.",
        fix="with model.no_sync():  # around forward and backward of all micro-batches but the last",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed without these calls" if case.has_gpu_work else "the time of these calls",
        confidence="high",
        falsified_by="use no_sync(); the finding is wrong if there are as many calls",
        places=case.places(again["event"]),
        evidence=(Evidence("collectives", collectives_by_size(again).head(8).to_dicts()),),
    )


def _reduced_again(case: Case) -> pl.DataFrame:
    """Return the calls of all-reduce whose sum a later backward pass before the same update repeats, and the `pass`.

    Such passes reduce the same sizes: those of two networks, each with its own, are no repetition.
    """
    calls = collectives(case.linked).filter(pl.col("collective") == "all_reduce", pl.col("phase") == "backward")
    if case.has_gpu_work:
        launches = case.linked.device.select("event", pl.col("launch_start_ns").alias("issued_ns"))
        calls = calls.join(launches, on="event", how="left", maintain_order="left").drop_nulls("issued_ns")
    else:
        calls = calls.with_columns(pl.col("start_ns").alias("issued_ns"))
    phase = pl.col("phase").cast(pl.String)
    ops = case.linked.host.filter(case.linked.is_op, phase.is_in(["forward", "backward", "optimizer"]))
    turns = ops.sort("start_ns").select("start_ns", phase).filter((phase != phase.shift()).fill_null(True))
    starts, passes, update, last = [0], [(0, 0)], 0, ""
    for start_ns, name in turns.iter_rows():
        update += name == "optimizer"
        if name == "forward" and last in ("backward", "optimizer"):
            starts.append(start_ns)
            passes.append((update, len(passes)))
        last = name
    sizes: dict[tuple[int, int], list[int]] = {}
    at = [passes[bisect_right(starts, issued_ns) - 1] for issued_ns in calls["issued_ns"]]
    for place, num_bytes in zip(at, calls["bytes"]):
        sizes.setdefault(place, []).append(num_bytes or 0)
    later: set[tuple[Any, ...]] = set()
    repeated: set[tuple[int, int]] = set()
    for place in sorted(sizes, reverse=True):
        what = (place[0], *sorted(sizes[place]))
        repeated |= {place} if what in later else set()
        later.add(what)
    again = pl.Series([place in repeated for place in at], dtype=pl.Boolean)
    return calls.with_columns(pl.Series("pass", [number for _, number in at], dtype=pl.Int64)).filter(again)


def _waited(case: Case) -> pl.DataFrame:
    """Return how long this rank waited for others in each call, by the call's start on its own clock."""
    try:
        across = case.across
    except Unavailable:
        return pl.DataFrame(schema={"start_ns": pl.Int64, "wait_ns": pl.Int64})
    own = across.matched.calls.filter(pl.col("rank") == case.rank).select("call", "start_ns")
    waits = across.stragglers.arrivals.filter(pl.col("rank") == case.rank).select("call", "wait_ns")
    return own.join(waits, on="call").group_by("start_ns").agg(pl.col("wait_ns").sum())


_CAUSED_SHARE = 0.5  # of all waiting time; if no rank causes that much, they take turns
_MORE = 1.05


@rule
def stragglers(case: Case) -> list[Finding]:
    """Do all ranks wait for one slow rank, or for a slow network?"""
    across = case.across
    calls = across.stragglers.calls
    if calls.is_empty():
        raise Unavailable(
            "No collective was found on several ranks. The traces of all ranks must be of the same steps."
        )
    ranks = across.stragglers.ranks.sort("caused_wait_ns", descending=True)
    worst = ranks.row(0, named=True)
    whole_ns = int(ranks["wait_ns"].sum())
    late = calls.filter(pl.col("last_rank") == worst["rank"], pl.col("is_certain"))
    num_steps = max(1, calls["step"].drop_nulls().n_unique())
    if not whole_ns or worst["caused_wait_ns"] < _CAUSED_SHARE * whole_ns or late.height * 2 < calls.height:
        return _slow_network(case, num_steps)
    # This rank's kernels in the delayed collectives.
    delayed = across.matched.calls.filter(pl.col("rank") == case.rank).select("call", "start_ns")
    delayed = delayed.join(late.select("call", "last_rank", "lead_ns"), on="call").drop("call")
    own = collectives(case.linked).join(delayed, on="start_ns")
    # What is saved if the last rank arrives together with the second to last.
    waiting = own.filter(pl.col("last_rank") != case.rank)
    saving_ns = _lead_ns(across, late) / num_steps  # for the late rank, which waits for no other
    clean = None if case.has_gpu_work else clean_times(case.analysis.summaries)
    if clean is not None:  # the profiler makes ranks late, too
        saving_ns = min(saving_ns, max(0.0, float(_excess(clean, worst["rank"]).sum())))
    if waiting.height and case.has_gpu_work:
        waiting = waiting.filter(pl.col("event").is_in(case.replay.events))
        shorter = waiting.select("event", pl.max_horizontal(pl.col("duration_ns") - pl.col("lead_ns"), 0))
        saving_ns = case.saving_ns(Change(duration_ns={event: float(ns) for event, ns in shorter.iter_rows()}))
    if not case.is_worth(saving_ns):
        return _slow_network(case, num_steps)
    waited_ns = _waited_ns(across, worst["rank"]) / num_steps
    is_every_step = late["step"].n_unique() == num_steps
    why, fix = (_cause(across.table, worst["rank"], case.path) if case.has_gpu_work else
                _cause_on_host(clean if clean is not None else _own_times(case.analysis.summaries), worst["rank"],
                               case.path))  # fmt: skip
    once = "" if num_steps > 1 else " Only one step was traced; starting the profiler may have delayed that rank."
    if case.has_gpu_work:
        times = Evidence(
            "GPU time by rank", across.table.select("rank", "compute_ns", "idle_ns", "memory_ns").to_dicts()
        )
    else:
        of_host = clean if clean is not None else _own_times(case.analysis.summaries)
        times = Evidence("host time by rank", of_host.to_dicts())
    return one_finding(
        sentence=f"Rank {worst['rank']} arrives last at {late.height} of {plural(calls.height, 'collective')} and "
        f"causes {whole_percent(worst['caused_wait_ns'] / whole_ns)} of all waiting: each other rank waits "
        f"{duration(waited_ns, 3)} per step. {why}{once}",
        fix=fix,
        saving_ns=saving_ns,
        derived=("the step replayed with these collectives shorter by" if case.has_gpu_work else "the sum of")
        + " the time from the second to last rank's arrival to the last"
        + ("; equally fast ranks would save more" if clean is None else ", at most what its clean steps take longer"),
        rows=() if case.has_gpu_work else _OF_LATE_RANK if case.rank == worst["rank"] else (_WAITING,),
        confidence="low" if num_steps == 1 else "high" if is_every_step else "medium",
        places=case.places(own["event"]),
        falsified_by="trace again; the finding is wrong if another rank is last",
        evidence=(
            Evidence("ranks", ranks.head(8).to_dicts()),
            Evidence("calls", late.sort("lead_ns", descending=True).head(8).to_dicts()),
            times,
        ),
    )


def _waited_ns(across: AcrossRanks, late: int) -> float:
    """Return how long another rank than the late one waits, on average."""
    waits = across.stragglers.arrivals.with_columns(end_ns=pl.col("start_ns") + pl.col("wait_ns"))
    others = waits.filter(pl.col("rank") != late).partition_by("rank")
    return fmean(length_ns(union(each.select("start_ns", "end_ns"))) for each in others)


def _lead_ns(across: AcrossRanks, late: pl.DataFrame) -> int:
    """Return how long only the last rank had not arrived; collectives of several buckets wait at the same time."""
    last = across.stragglers.arrivals.group_by("call").agg(end_ns=pl.col("start_ns").max())
    leads = late.join(last, on="call").select(start_ns=pl.col("end_ns") - pl.col("lead_ns"), end_ns="end_ns")
    return length_ns(union(leads))


def _slow_network(case: Case, num_steps: int) -> list[Finding]:
    """Return the group whose transfers lose most time: no rank is late, but they take longer than equal ones."""
    across = case.across
    groups = transfers(across.stragglers)
    if groups.is_empty() or not groups["num_slow"][0]:
        return []
    worst = groups.row(0, named=True)
    same = [pl.col(name) == worst[name] for name in ("collective", "bytes", "group_size", "members")]
    slow = timed_transfers(across.stragglers).filter(*same, pl.col("excess_ns") > 0)
    own = across.matched.calls.filter(pl.col("rank") == case.rank).select("call", "start_ns")
    kernels = collectives(case.linked).join(own.join(slow.select("call", "excess_ns"), on="call"), on="start_ns")
    saving_ns = float(slow["excess_ns"].sum()) / num_steps
    is_always = worst["num_slow"] * 2 > worst["num_calls"]
    is_replayed = is_always and kernels.height > 0  # this rank is in the group, and its typical steps are slow
    if is_replayed:
        inside = kernels.filter(pl.col("event").is_in(case.replay.events))
        shorter = inside.select("event", pl.max_horizontal(pl.col("duration_ns") - pl.col("excess_ns"), 0))
        saving_ns = case.saving_ns(Change(duration_ns={event: float(ns) for event, ns in shorter.iter_rows()}))
    if not case.is_worth(saving_ns):
        return []
    what = f"{worst['collective']} of {size(worst['bytes'])}"
    usual = "the other groups" if worst["num_groups"] > 1 else "its other calls"
    took_ns = float(slow["transfer_ns"].median())  # type: ignore[arg-type]  # numbers
    which = f"ranks {worst['members']}" if worst["group_size"] <= 8 else f"{worst['group_size']} ranks"
    return one_finding(
        sentence=f"No rank is late, but {worst['num_slow']} of {plural(worst['num_calls'], 'call')} of {what} among "
        f"{which} take {duration(took_ns, 3)} after the last rank has come (median of {usual}: "
        f"{duration(worst['usual_ns'], 3)}). So neither a host nor the computing of a GPU is slow, but the network"
        f"{'' if is_always else ' at times'}, or what shares it. Traces do not show which link: a group is as fast "
        "as its slowest.",
        fix=f"NCCL_DEBUG=INFO shows the transport between these ranks (NET/IB, NET/Socket, P2P, SHM); nccl-tests "
        f"(all_reduce_perf -b {worst['bytes']}) measures it without the training",
        saving_ns=saving_ns,
        derived="the step replayed with the usual transfer" if is_replayed else
        "the time over the usual transfer, divided by all steps; not replayed, because the typical steps of this "
        "rank do not have these calls",
        confidence="medium" if is_replayed else "low",
        places=case.places(kernels["event"]),
        falsified_by="trace again; the finding is wrong if other groups or calls are slow, or if computing beside "
        "these collectives takes their place on the GPU",
        evidence=(Evidence("equal collectives", groups.head(8).to_dicts()),),
    )  # fmt: skip


def _cause(table: pl.DataFrame, rank: int, path: Path) -> tuple[str, str]:
    """Return how the rank's GPU differs from the others, and the fix."""

    def figures(name: str) -> tuple[float, float]:
        own: Any = table.filter(pl.col("rank") == rank)[name].sum()
        rest: Any = table.filter(pl.col("rank") != rank)[name].median()
        return float(own), float(rest or 0.0)

    compute, usual = figures("compute_ns")
    if compute > _MORE * usual:
        return (
            f"Its GPU computes for {duration(compute, 3)} (median of the others: {duration(usual, 3)}), so it has "
            "more work or is slower.",
            "give each rank the same number of tokens (sort or pack by length), experts and layers; check that rank "
            "with nvidia-smi -q -d PERFORMANCE",
        )
    idle, usual = figures("idle_ns")
    return (
        f"Its GPU computes no longer than the others but is idle for {duration(idle, 3)} (median of the others: "
        f"{duration(usual, 3)}), so its host is slow to load data or launch kernels.",
        f"stepscope diagnose {shlex.quote(str(path))} --rank {rank}  # then fix data loading or CPU pinning on that "
        "rank",
    )


_PARTS = {
    "data": "Fetching its batch",
    "forward": "Its forward",
    "backward": "Its backward (without waiting)",
    "optimizer": "Its optimizer",
    "other": "What it does between the passes, such as making a batch,",
}


def _own_times(summaries: Sequence[RankSummary]) -> pl.DataFrame:
    """Return each rank's host time per traced step by phase, its backward without communication that is exposed."""
    rows = []
    for each in summaries:
        waited_ns = float(each.collectives["exposed_ns"].sum()) / max(1, each.num_steps)
        own = {phase: each.host_ns.get(phase, 0.0) for phase in _PARTS}
        rows.append({"rank": each.rank, **own, "backward": max(0.0, own["backward"] - waited_ns)})
    return pl.DataFrame(rows).rename({phase: f"{phase}_ns" for phase in _PARTS})


def _excess(times: pl.DataFrame, rank: int) -> pl.Series:
    """Return how much longer each part of a rank's step is than in the others."""
    own, others = times.filter(pl.col("rank") == rank), times.filter(pl.col("rank") != rank).median()
    parts = [name for name in times.columns if name != "rank"]
    return pl.Series([own[name][0] - others[name][0] for name in parts])


def _cause_on_host(times: pl.DataFrame, rank: int, path: Path) -> tuple[str, str]:
    """Return which part of the late rank's step is longer than in the others, and the fix."""
    own, others = times.filter(pl.col("rank") == rank), times.filter(pl.col("rank") != rank).median()
    parts = [name for name in times.columns if name != "rank"]
    column = parts[int(_excess(times, rank).arg_max() or 0)]
    most = column.removesuffix("_ns")
    took, usual = (duration(side[column][0], 3) for side in (own, others))
    look = f"stepscope diagnose {shlex.quote(str(path))} --rank {rank}  # then fix what is slow there"
    return f"{_PARTS[most]} takes {took} (median of the others: {usual}).", look
