"""Does the GPU communicate without computing at the same time?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.ranks.collectives import collectives_by_size
from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, duration, one_finding, plural, size

_FIXES = {
    "all_reduce": "DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True); with "
    "model.no_sync(): around all micro-batches but the last",
    "all_gather": "FSDP(…, forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE); with "
    "fully_shard: set_modules_to_forward_prefetch",
    "reduce_scatter": "FSDP(…, backward_prefetch=BackwardPrefetch.BACKWARD_PRE), and wrap larger units",
    "all_to_all": "dist.all_to_all_single(…, async_op=True), and wait() only before its result is used",
}
_SMALL_BYTES = 1 << 20  # smaller messages are limited by latency, not bandwidth


def check(case: Case) -> list[Finding]:
    if not case.has_gpu_work:
        raise Unavailable("There is no trace of GPU work, so NCCL and RCCL kernels cannot be seen.")
    calls = case.account.collectives.filter(pl.col("event").is_in(case.replay.events))
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
        derived="the step replayed with that part hidden behind computation"
        + ("; the time each call waits for other ranks is excluded" if is_split else
           "; part of it may be waiting for other ranks, which only a folder with every rank's trace shows"),
        confidence="medium" if is_split else "low",
        falsified_by="look for work to overlap; the finding is wrong if all remaining work needs the result",
        places=case.places(calls.filter(pl.col("own_ns") > 0)["event"]),
        evidence=(Evidence("collectives", collectives_by_size(calls).head(8).to_dicts()),),
    )  # fmt: skip


def _waited(case: Case) -> pl.DataFrame:
    """Return how long this rank waited for others in each call, by the call's start on its own clock."""
    try:
        across = case.across
    except Unavailable:
        return pl.DataFrame(schema={"start_ns": pl.Int64, "wait_ns": pl.Int64})
    own = across.matched.calls.filter(pl.col("rank") == case.rank).select("call", "start_ns")
    waits = across.stragglers.arrivals.filter(pl.col("rank") == case.rank).select("call", "wait_ns")
    return own.join(waits, on="call").group_by("start_ns").agg(pl.col("wait_ns").sum())
