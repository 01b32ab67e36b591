"""Does the GPU stand while it communicates, with nothing to compute beside?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.ranks.collectives import collectives_by_size
from stepscope.analysis.time.replay import Change
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural, size
from stepscope.session.case import Case

_FIXES = {
    "all_reduce": "DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True); with "
    "model.no_sync(): around all micro-batches but the last",
    "all_gather": "FSDP(…, forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE); of fully_shard: "
    "set_modules_to_forward_prefetch",
    "reduce_scatter": "FSDP(…, backward_prefetch=BackwardPrefetch.BACKWARD_PRE), and larger units to wrap",
    "all_to_all": "dist.all_to_all_single(…, async_op=True), and wait() only where its result is read",
}
_SMALL_BYTES = 1 << 20
"""A smaller message takes as long as a link answers, not as it carries."""


def check(case: Case) -> list[Finding]:
    if not case.has_gpu_work:
        raise Unavailable("there is no trace of GPU work: collectives are seen as kernels of NCCL or RCCL")
    calls = case.collectives
    if calls.is_empty():
        return []
    calls = calls.join(_waited(case), on="start_ns", how="left").with_columns(pl.col("wait_ns").fill_null(0))
    # A kernel that came early waits for other ranks: that part is the stragglers', and comes first.
    own = pl.max_horizontal(pl.col("exposed_ns") - pl.col("wait_ns"), 0).alias("own_ns")
    calls = calls.with_columns(own)
    durations = {
        event: float(duration - part)
        for event, duration, part in calls.select("event", "duration_ns", "own_ns").iter_rows()
    }
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    exposed_ns = float(calls["own_ns"].sum()) / case.num_steps
    whole_ns = float(calls["duration_ns"].sum()) / case.num_steps
    kinds = calls.group_by("collective").agg(pl.col("own_ns").sum(), pl.len()).sort("own_ns", descending=True)
    worst = str(kinds["collective"][0])
    of_kind = calls.filter(pl.col("collective") == worst)
    sizes = of_kind.drop_nulls("bytes").group_by("bytes").agg(pl.col("own_ns").sum()).sort("own_ns", descending=True)
    small_ns = int(sizes.filter(pl.col("bytes") < _SMALL_BYTES)["own_ns"].sum())
    sizes_text = ""
    if small_ns * 2 > int(of_kind["own_ns"].sum()):
        sizes_text = f", mostly below {size(_SMALL_BYTES)}, which take as long as a link answers"
    elif sizes.height:
        sizes_text = f", the longest of {size(sizes['bytes'][0])}"
    is_split = bool(calls["wait_ns"].sum())
    return [
        Finding(
            sentence=f"{duration(exposed_ns, 3)} of {duration(case.step_ns, 3)} go to communication beside which "
            f"nothing computes, of {duration(whole_ns, 3)} in all: most of it in "
            f"{plural(of_kind.height / case.num_steps, worst + ' call')} a step{sizes_text}.",
            fix=_FIXES.get(worst, "start it earlier (async_op=True), and wait where its result is read"),
            saving_ns=saving_ns,
            upper_bound=True,
            derived="the step replayed with that part hidden behind computing"
            + ("; what each call waited for other ranks is left out" if is_split else
               "; a part of it may be waiting for other ranks, which a folder with every rank's trace would tell"),
            confidence="medium" if is_split else "low",
            falsified_by="nothing to compute at that time that does not need the result",
            places=case.places(calls.filter(pl.col("own_ns") > 0)["event"]),
            evidence=(
                Evidence("collectives", collectives_by_size(calls).head(8).to_dicts()),
            ),
        )
    ]  # fmt: skip


def _waited(case: Case) -> pl.DataFrame:
    """What this rank waited for others in each call, by the call's start on its own clock."""
    try:
        across = case.across
    except Unavailable:
        return pl.DataFrame(schema={"start_ns": pl.Int64, "wait_ns": pl.Int64})
    own = across.matched.calls.filter(pl.col("rank") == case.rank).select("call", "start_ns")
    waits = across.stragglers.arrivals.filter(pl.col("rank") == case.rank).select("call", "wait_ns")
    return own.join(waits, on="call").group_by("start_ns").agg(pl.col("wait_ns").sum())
