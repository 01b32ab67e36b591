"""Ranks side by side: matching collectives, clock offsets, and which rank waits for which."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import polars as pl

from stepscope.analysis.kernels.copies import bandwidth
from stepscope.analysis.ranks.collectives import POINT_TO_POINT, SCHEMA, UNKNOWN, bus_factor
from stepscope.analysis.structure.links import Share
from stepscope.analysis.time.gpu_time import GpuTime

SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank can leave before every rank has entered."""
ENOUGH_CALLS = 4  # calls needed for quartiles to describe the spread
REASONS = {
    "unknown": "The trace does not show which collective the kernel is.",
    "point_to_point": "Sends and receives cannot be matched by order.",
    "other_device": "Not on the device that the rank mostly communicates on.",
    "alone": "No other rank's trace has such a call in this step.",
    "numbers_differ": "Ranks made different numbers of such calls in this step, so a trace is incomplete.",
    "sizes_differ": "Ranks made equally many calls, but of different sizes.",
}
_LOT = ["group", "group_ranks", "collective", "step"]
_NUM = pl.len().cast(pl.Int64)


@dataclass(frozen=True)
class Matched:
    """The calls of collectives that several ranks have in common."""

    calls: pl.DataFrame
    """One row per call and rank: `call`, `group`, `group_size`, `collective`, `step`, `rank`, `bytes`, `start_ns`,
    `end_ns`, `duration_ns`, on the rank's own clock. Calls are numbered by their start on the lowest rank."""
    unmatched: pl.DataFrame  # `rank`, `reason` (of `REASONS`), `num_kernels`
    unlinked: Share  # communication kernels without a match, out of all
    ranks: tuple[int, ...]


def match_collectives(per_rank: Mapping[int, pl.DataFrame]) -> Matched:
    """Return which kernels of different ranks are the same collective, from each rank's `collectives`.

    NCCL requires the same order of calls in a process group on every rank, so the k-th call of a kind, group and step
    matches on all ranks. A missing call would shift all later ones, so a kind's calls in a step are matched together
    or not at all: only if all ranks made as many, with the same known sizes (except all-to-all). Steps without
    profiler numbers count from the beginning of each trace.
    """
    frames = [frame.with_columns(rank=pl.lit(rank, pl.Int64)) for rank, frame in per_rank.items()]
    rows = pl.concat(frames) if frames else pl.DataFrame(schema={**SCHEMA, "rank": pl.Int64})
    device, kind = pl.col("device").fill_null(-1), pl.col("collective")
    is_elsewhere = (device != device.mode().min()).over("rank")
    rows = rows.sort("rank", "start_ns", "event").with_columns(
        _reason(unknown=kind == UNKNOWN, point_to_point=kind.is_in(POINT_TO_POINT), other_device=is_elsewhere)
    )
    candidates = rows.filter(pl.col("reason").is_null()).drop("reason")
    checked = candidates.join(_mismatches(candidates), on=_LOT, nulls_equal=True, maintain_order="left")
    calls = (
        checked.filter(pl.col("reason").is_null())
        .with_columns(place=pl.int_range(pl.len()).over("rank", *_LOT))
        .with_columns(first=pl.struct("rank", "start_ns", "event").first().over(*_LOT, "place"))
        .with_columns(call=pl.col("first").rank("dense") - 1)
        .sort("call", "rank")
    )
    lost = pl.concat([part.select("rank", "reason") for part in (rows, checked)]).drop_nulls("reason")
    return Matched(
        calls.select("call", "group", "group_size", "collective", "step", "rank", "bytes", "start_ns", "end_ns",
                     "duration_ns").with_columns(pl.col(pl.Categorical).cast(pl.String)),
        lost.group_by("rank", "reason").agg(num_kernels=_NUM).sort("rank", "reason"),
        Share(lost.height, rows.height),
        tuple(sorted(per_rank)),
    )  # fmt: skip


def _mismatches(candidates: pl.DataFrame) -> pl.DataFrame:
    """Return why calls of a kind, group and step cannot be matched (`reason`); null if they can."""
    is_told = pl.col("num_elements").is_not_null().all() & (pl.col("collective") != "all_to_all").all()
    sizes = pl.when(is_told).then(pl.col("num_elements").cast(pl.String).str.join(","))
    runs = candidates.group_by("rank", *_LOT).agg(num=pl.len(), sizes=sizes)
    num_sizes = pl.col("sizes").drop_nulls().n_unique()
    return runs.group_by(_LOT).agg(
        _reason(alone=pl.len() < 2, numbers_differ=pl.col("num").n_unique() > 1, sizes_differ=num_sizes > 1)
    )


def _reason(**cases: pl.Expr) -> pl.Expr:
    """Return the name of the first case that holds as `reason`, or null."""
    return pl.coalesce(*(pl.when(case).then(pl.lit(name)) for name, case in cases.items())).alias("reason")


def clock_alignment(matched: Matched, base_times_ns: Mapping[int, int] | None = None) -> pl.DataFrame:
    """Return each rank's clock offset to the lowest rank, in ns, one row per rank.

    `reference`: the lowest rank that collectives connect it to. `offset_ns`: its clock minus the reference's.
    `earliest_ns`, `latest_ns`: the causal bounds of the offset. `is_contradicted`: the bounds are empty, so a match
    or a time is wrong. `num_calls`: collectives used. `skew_ns`: the offset beyond the traces' base times.

    Ranks leave a synchronizing collective nearly together: the offset is the median difference of their ends, its
    uncertainty half the inter-quartile range. Systematic differences, as from the position in a ring, cannot be seen.
    With fewer than `ENOUGH_CALLS` calls, causality gives the uncertainty: no rank leaves before the last has entered,
    so the offset lies between `start - reference's end` and `end - reference's start` of every call. The median is
    clipped to these bounds; if they contradict each other, the uncertainty is at least their disagreement. It is at
    least two clock ticks, and the bounds are widened as much: old traces have microseconds.

    A rank that never meets the reference is measured through others; uncertainties and bounds add up.
    """
    edges = _edges(matched.calls.filter(pl.col("collective").is_in(SYNCHRONIZING)).sort("call", "rank"))
    found = edges.clear().drop("through")
    for rank in matched.ranks:  # ascending: a rank that no lower rank reaches is its own reference
        if rank in found["rank"]:
            continue
        reached = pl.DataFrame({"rank": [rank], "reference": [rank], "is_contradicted": [False]})
        reached = pl.concat([found.clear(), reached], how="diagonal").with_columns(pl.col(pl.Int64).fill_null(0))
        found = pl.concat([found, _reached_from(reached, edges)])
    bases = pl.col("rank", "reference").replace_strict(dict(base_times_ns or {}), default=0, return_dtype=pl.Int64)
    base = found.select(bases)
    skew = pl.col("offset_ns") + base["rank"] - base["reference"]
    return found.with_columns(skew_ns=skew).sort("rank")


def _edges(calls: pl.DataFrame) -> pl.DataFrame:
    """Return directly measured clocks: `rank` against `through`, every rank of a call and its lowest, both ways."""
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
    """Return a rank and all ranks measured from it, with the fewest hops, then the least uncertainty."""
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
    """Which ranks arrive last at synchronizing collectives, and the waiting they cause, on aligned clocks."""

    calls: pl.DataFrame
    """One row per call: `bytes` (largest of a rank), `last_rank`, `transfer_ns` (the last rank's kernel), `wait_ns`
    (of all ranks), `num_ranks` seen, `lead_ns` (last after second to last), `is_certain` (longer than the clock
    uncertainty), `bus_bandwidth_bytes_per_s` (over the transfer).
    """
    arrivals: pl.DataFrame
    """One row per call and rank: `call`, `rank`, `last_rank`, `start_ns` and `end_ns` on the reference's clock,
    `duration_ns`, `wait_ns`, `transfer_ns`, `is_clamped`."""
    ranks: pl.DataFrame
    """One row per rank: `num_last`, `num_last_certain`, `caused_wait_ns` (of others), `wait_ns` (its own),
    `transfer_ns`, `num_calls`, `communication_ns` (both), `wait_share` of it."""
    pairs: pl.DataFrame  # which rank waits for which: `rank`, `last_rank`, `wait_ns`, `num_calls`; the longest first
    num_clamped: int  # arrivals that end before the last rank arrives: clocks or matches are that wrong

    @property
    def wait_share(self) -> float:
        """Waiting as a share of all time in matched collectives."""
        return int(self.ranks["wait_ns"].sum()) / max(1, int(self.ranks["communication_ns"].sum()))


def stragglers(matched: Matched, clocks: pl.DataFrame) -> Stragglers:
    """Return for every matched synchronizing collective which rank arrived last and how long the others waited.

    A rank waits from its own start to the last one's, at most for its kernel's duration (`is_clamped`); the rest is
    transfer, so `wait_ns + transfer_ns == duration_ns`. All waiting counts for the last rank. Ranks without a trace
    cannot be seen to be last: compare `num_ranks` with `group_size`.
    """
    offset = pl.col("offset_ns")
    aligned = (
        matched.calls.filter(pl.col("collective").is_in(SYNCHRONIZING))
        .join(clocks.select("rank", "offset_ns", "uncertainty_ns"), on="rank")
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
    """Return each rank's `gpu_time` as a row: `rank`, its fields, and shares.

    `overlapped_communication_share` is relative to communication (null without), `idle_share` and
    `exposed_communication_share` to the window.

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
