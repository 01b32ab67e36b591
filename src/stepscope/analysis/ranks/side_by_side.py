"""Ranks side by side: the same collective on each, how their clocks stand to one another, who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import polars as pl

from stepscope.analysis.ranks.collectives import POINT_TO_POINT, SCHEMA, UNKNOWN, bus_factor
from stepscope.analysis.structure.links import Share
from stepscope.analysis.structure.rates import bandwidth
from stepscope.analysis.time.gpu_time import GpuTime

SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank can leave before every rank has come."""
ENOUGH_CALLS = 4
"""Calls from which quartiles say something of the spread."""
REASONS = {
    "unknown": "The trace does not say which collective the kernel is.",
    "point_to_point": "A send or a receive: the k-th of one rank is not the k-th of another.",
    "other_device": "Not on the device on which the rank communicates most.",
    "alone": "No other rank's trace has the like in this step.",
    "numbers_differ": "Ranks made different numbers of such calls in this step: one trace lacks some.",
    "sizes_differ": "Ranks made as many calls, but not of the same sizes.",
}
_LOT = ["group", "group_ranks", "collective", "step"]
_NUM = pl.len().cast(pl.Int64)


@dataclass(frozen=True)
class Matched:
    """The same collectives on several ranks."""

    calls: pl.DataFrame
    """One row a call and rank: `call`, `group`, `group_size`, `collective`, `step`, `rank`, `bytes`, `start_ns`,
    `end_ns`, `duration_ns`; times on the rank's own clock. Calls are numbered as they begin on their lowest rank."""
    unmatched: pl.DataFrame
    """`rank`, `reason` (of `REASONS`), `num_kernels`."""
    unlinked: Share
    """Communication kernels without a match, of all."""
    ranks: tuple[int, ...]


def match_collectives(per_rank: Mapping[int, pl.DataFrame]) -> Matched:
    """Which kernels of different ranks are one collective, from each rank's `collectives`.

    NCCL wants the calls of a process group in one order on every rank: the k-th of a kind, group and step is the
    same call on all. One call that a trace lacks would shift all that follow, so the calls of a kind in a step are
    matched together or not at all: when every rank that has any made as many, and of the same sizes where these are
    told (an all-to-all's are each rank's own). Steps that the profiler did not number count from the beginning of
    each trace: traces that begin in different steps are then matched with whole steps between them.
    """
    frames = [frame.with_columns(rank=pl.lit(rank, pl.Int64)) for rank, frame in per_rank.items()]
    rows = pl.concat(frames) if frames else pl.DataFrame(schema={**SCHEMA, "rank": pl.Int64})
    device, kind = pl.col("device").fill_null(-1), pl.col("collective")
    rows = rows.sort("rank", "start_ns", "event").with_columns(
        pl.when(kind == UNKNOWN)
        .then(pl.lit("unknown"))
        .when(kind.is_in(POINT_TO_POINT))
        .then(pl.lit("point_to_point"))
        .when((device != device.mode().min()).over("rank"))
        .then(pl.lit("other_device"))
        .alias("reason")
    )
    candidates = rows.filter(pl.col("reason").is_null()).drop("reason")
    judged = candidates.join(_judged(candidates), on=_LOT, nulls_equal=True, maintain_order="left")
    calls = (
        judged.filter(pl.col("reason").is_null())
        .with_columns(place=pl.int_range(pl.len()).over("rank", *_LOT))
        .with_columns(first=pl.struct("rank", "start_ns", "event").first().over(*_LOT, "place"))
        .with_columns(call=pl.col("first").rank("dense") - 1)
        .sort("call", "rank")
    )
    lost = pl.concat([part.select("rank", "reason") for part in (rows, judged)]).drop_nulls("reason")
    return Matched(
        calls.select("call", "group", "group_size", "collective", "step", "rank", "bytes", "start_ns", "end_ns",
                     "duration_ns"),
        lost.group_by("rank", "reason").agg(num_kernels=_NUM).sort("rank", "reason"),
        Share(lost.height, rows.height),
        tuple(sorted(per_rank)),
    )  # fmt: skip


def _judged(candidates: pl.DataFrame) -> pl.DataFrame:
    """For the calls of a kind, group and step: why they cannot be matched (`reason`), null when they can."""
    is_told = pl.col("num_elements").is_not_null().all() & (pl.col("collective") != "all_to_all").all()
    sizes = pl.when(is_told).then(pl.col("num_elements").cast(pl.String).str.join(","))
    runs = candidates.group_by("rank", *_LOT).agg(num=pl.len(), sizes=sizes)
    return runs.group_by(_LOT).agg(
        pl.when(pl.len() < 2)
        .then(pl.lit("alone"))
        .when(pl.col("num").n_unique() > 1)
        .then(pl.lit("numbers_differ"))
        .when(pl.col("sizes").drop_nulls().n_unique() > 1)
        .then(pl.lit("sizes_differ"))
        .alias("reason")
    )


@dataclass(frozen=True)
class ClockAlignment:
    """How the clocks of ranks stand to one another."""

    offsets: pl.DataFrame
    """One row a rank. `reference`: the rank against which it is measured, the lowest that collectives tie it to, or
    itself. `offset_ns`: its clock less the reference's. `uncertainty_ns`.
    `earliest_ns`, `latest_ns`: between what causality wants the offset. `is_contradicted`: it leaves nothing, so
    some match, or some time, is wrong. `num_calls`: collectives it was measured by. `skew_ns`: what is left of the
    offset after the traces' own base times."""


def clock_alignment(matched: Matched, base_times_ns: Mapping[int, int] | None = None) -> ClockAlignment:
    """Each rank's clock against the lowest rank's, in nanoseconds.

    Ranks leave a synchronizing collective nearly together: the offset is the median of the differences of their
    ends, and its uncertainty half the inter-quartile range. By how much one rank really leaves later, which its
    place in a ring can make systematic, no trace tells. With fewer than `ENOUGH_CALLS` calls the uncertainty is what
    causality leaves open: nobody leaves before the last has come, so the offset lies between `start - reference's
    end` and `end - reference's start` of every call. The median is kept inside these bounds; where they contradict
    each other the uncertainty is at least their disagreement. It is never less than two grains of the clock, one for
    a start and one for a duration, and the bounds are as much wider: old traces have microseconds.

    A rank that never meets the reference is measured through others; uncertainties and bounds add up.
    """
    edges = _edges(matched.calls.filter(pl.col("collective").is_in(SYNCHRONIZING)).sort("call", "rank"))
    found = edges.clear().drop("through")
    for rank in matched.ranks:  # ascending: one that no lower rank reaches is a reference itself
        if rank in found["rank"]:
            continue
        reached = pl.DataFrame({"rank": [rank], "reference": [rank], "is_contradicted": [False]})
        reached = pl.concat([found.clear(), reached], how="diagonal").with_columns(pl.col(pl.Int64).fill_null(0))
        found = pl.concat([found, _reached_from(reached, edges)])
    bases = pl.col("rank", "reference").replace_strict(dict(base_times_ns or {}), default=0, return_dtype=pl.Int64)
    base = found.select(bases)
    skew = pl.col("offset_ns") + base["rank"] - base["reference"]
    return ClockAlignment(found.with_columns(skew_ns=skew).sort("rank"))


def _edges(calls: pl.DataFrame) -> pl.DataFrame:
    """Clocks measured directly: `rank` against `through`, every rank of a call and the lowest of it, both ways."""
    is_whole = (pl.col("start_ns") % 1000 == 0) & (pl.col("duration_ns") % 1000 == 0)
    is_coarse = calls.group_by("rank").agg(is_coarse=is_whole.all())["is_coarse"].any()
    resolution = pl.lit(2000 if is_coarse else 2, pl.Int64)
    lowest = calls.group_by("call").agg(pl.col("rank", "start_ns", "end_ns").first().name.prefix("lowest_"))
    pairs = calls.join(lowest, on="call").filter(pl.col("rank") != pl.col("lowest_rank"))
    ends = pl.col("end_ns") - pl.col("lowest_end_ns")
    low, high, median = pl.col("earliest_ns"), pl.col("latest_ns"), pl.col("offset_ns")
    open_ns = pl.when(pl.col("num_calls") < ENOUGH_CALLS).then(pl.max_horizontal(median - low, high - median))
    measured = (
        pairs.group_by("rank", through="lowest_rank")
        .agg(
            reference=pl.col("lowest_rank").first(),
            offset_ns=ends.median().round().cast(pl.Int64),
            spread=((ends.quantile(0.75, "linear") - ends.quantile(0.25, "linear")) / 2).ceil().cast(pl.Int64),
            earliest_ns=(pl.col("start_ns") - pl.col("lowest_end_ns")).max() - resolution,
            latest_ns=(pl.col("end_ns") - pl.col("lowest_start_ns")).min() + resolution,
            num_calls=_NUM,
        )
        .with_columns(is_contradicted=low > high)
        .with_columns(pl.when("is_contradicted").then(median).otherwise(median.clip(low, high)))
        .with_columns(uncertainty_ns=pl.max_horizontal(open_ns.fill_null(pl.col("spread")), resolution, low - high))
        .select("through", "rank", "reference", "offset_ns", "uncertainty_ns", "earliest_ns", "latest_ns",
                "is_contradicted", "num_calls")
    )  # fmt: skip
    back = measured.with_columns(
        through="rank", rank="through", reference="rank", offset_ns=-median, earliest_ns=-high, latest_ns=-low
    )
    return pl.concat([measured, back])


def _reached_from(reached: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """A rank and all that are measured from it, in as few steps as can be, then with the least uncertainty."""
    added = ["offset_ns", "uncertainty_ns", "earliest_ns", "latest_ns"]
    while True:
        steps = edges.join(reached, left_on="through", right_on="rank", suffix="_before")
        new = (
            steps.join(reached, on="rank", how="anti")
            .with_columns(
                *(pl.col(name) + pl.col(f"{name}_before") for name in added),
                pl.col("reference_before").alias("reference"),
                pl.col("is_contradicted") | pl.col("is_contradicted_before"),
            )
            .sort("uncertainty_ns", "through")
            .unique("rank", keep="first", maintain_order=True)
            .select(reached.columns)
        )
        if new.is_empty():
            return reached
        reached = pl.concat([reached, new])


@dataclass(frozen=True)
class Stragglers:
    """Who comes last to collectives, and what that costs whom; synchronizing ones, on aligned clocks."""

    calls: pl.DataFrame
    """One row a call: `call`, `group`, `group_size`, `collective`, `step`, `bytes` (the most of a rank), `last_rank`,
    `transfer_ns` (the last rank's kernel), `wait_ns` (of all ranks), `num_ranks` seen, `lead_ns` (how long the last
    came after the one before), `is_certain` (longer than the clocks' uncertainty), `bus_bandwidth_bytes_per_s` (over
    the transfer: what the links did)."""
    arrivals: pl.DataFrame
    """One row a call and rank: `call`, `rank`, `last_rank`, `start_ns` and `end_ns` on the reference's clock,
    `duration_ns`, `wait_ns`, `transfer_ns`, `is_clamped`."""
    ranks: pl.DataFrame
    """One row a rank: `rank`, `num_last`, `num_last_certain`, `caused_wait_ns` (others waited for it), `wait_ns` (it
    waited), `transfer_ns`, `num_calls`, `communication_ns` (both), `wait_share` of it."""
    pairs: pl.DataFrame
    """Who waits for whom: `rank`, `last_rank`, `wait_ns`, `num_calls`; the longest first."""
    num_clamped: int
    """Arrivals that end before the last one came, on these clocks: clocks or matches are wrong by that much."""

    @property
    def wait_share(self) -> float:
        """Waiting, of all time in matched collectives on all ranks."""
        return int(self.ranks["wait_ns"].sum()) / max(1, int(self.ranks["communication_ns"].sum()))


def stragglers(matched: Matched, clocks: ClockAlignment) -> Stragglers:
    """Of every matched synchronizing collective, who came last and how long each other rank waited for it, in ns.

    A rank waits from its own start to the last one's, and no longer than its kernel runs (`is_clamped`); the rest is
    transfer, so that `wait_ns + transfer_ns == duration_ns`. All of a wait is put down to the last rank, though
    others may have come nearly as late. Ranks whose traces are not here cannot be seen to come last: compare
    `num_ranks` with `group_size`.
    """
    offset = pl.col("offset_ns")
    aligned = (
        matched.calls.filter(pl.col("collective").is_in(SYNCHRONIZING))
        .join(clocks.offsets.select("rank", "offset_ns", "uncertainty_ns"), on="rank")
        .with_columns(pl.col("start_ns") - offset, pl.col("end_ns") - offset)
        .sort("call", "start_ns", "rank", descending=[False, True, False])
    )
    gap = pl.col("start_ns").max().over("call") - pl.col("start_ns")
    arrivals = (
        aligned.with_columns(last_rank=pl.col("rank").first().over("call"), gap=gap)
        .with_columns(wait_ns=pl.min_horizontal("gap", "duration_ns"))
        .with_columns(
            transfer_ns=pl.col("duration_ns") - pl.col("wait_ns"), is_clamped=pl.col("gap") > pl.col("wait_ns")
        )
    )
    lead, doubt = pl.col("start_ns").first() - pl.col("start_ns").get(1), pl.col("uncertainty_ns").head(2).sum()
    by_call = (
        arrivals.group_by("call", maintain_order=True)
        .agg(
            pl.col("group", "group_size", "collective", "step").first(),
            pl.col("bytes").max(),
            pl.col("last_rank", "transfer_ns").first(),
            pl.col("wait_ns").sum(),
            num_ranks=_NUM,
            lead_ns=lead,
            is_certain=lead > doubt,
        )
        .with_columns(bus_bandwidth_bytes_per_s=bandwidth(pl.col("bytes") * bus_factor(), pl.col("transfer_ns")))
    )
    waits = arrivals.filter(pl.col("rank") != pl.col("last_rank"))
    pairs = waits.group_by("rank", "last_rank").agg(pl.col("wait_ns").sum(), num_calls=_NUM)
    return Stragglers(
        by_call,
        arrivals.select("call", "rank", "last_rank", "start_ns", "end_ns", "duration_ns", "wait_ns", "transfer_ns",
                        "is_clamped").sort("call", "rank"),
        _by_rank(matched, arrivals, by_call, pairs),
        pairs.sort("wait_ns", "rank", "last_rank", descending=[True, False, False]),
        int(arrivals["is_clamped"].sum()),
    )  # fmt: skip


def _by_rank(matched: Matched, arrivals: pl.DataFrame, by_call: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    every = pl.DataFrame({"rank": pl.Series(matched.ranks, dtype=pl.Int64)})
    own = arrivals.group_by("rank").agg(
        pl.col("wait_ns", "transfer_ns").sum(), num_calls=_NUM, communication_ns=pl.col("duration_ns").sum()
    )
    last = by_call.group_by(rank="last_rank").agg(num_last=_NUM, num_last_certain=pl.col("is_certain").sum())
    caused = pairs.group_by(rank="last_rank").agg(caused_wait_ns=pl.col("wait_ns").sum())
    for part in (last, caused, own):
        every = every.join(part, on="rank", how="left", maintain_order="left")
    share = pl.col("wait_ns") / pl.when(pl.col("communication_ns") > 0).then("communication_ns")
    return every.fill_null(0).with_columns(wait_share=share)


def rank_table(per_rank: Mapping[int, GpuTime]) -> pl.DataFrame:
    """Each rank's `gpu_time` as a row: `rank`, its fields, and shares.

    `overlapped_communication_share` of communication, null where there is none; `idle_share` and
    `exposed_communication_share` of the window. Takes accounts, not traces: one rank needs to be in memory at a time.

    >>> rank_table({0: GpuTime(window_ns=8, idle_ns=2)})["idle_share"][0]
    0.25
    """
    rows = [{"rank": rank, **asdict(time)} for rank, time in sorted(per_rank.items())]
    schema = dict.fromkeys(("rank", *asdict(GpuTime())), pl.Int64)

    def share(part: str, whole: str) -> pl.Expr:
        return (pl.col(part) / pl.when(pl.col(whole) > 0).then(whole)).alias(part.replace("_ns", "_share"))

    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(
        share("overlapped_communication_ns", "communication_ns"),
        share("idle_ns", "window_ns"),
        share("exposed_communication_ns", "window_ns"),
    )
