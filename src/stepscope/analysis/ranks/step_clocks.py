"""Clocks and stragglers of a whole run, from the steps that every rank timed: no trace is needed.

Ranks that train together leave each step's last collective together. So a step is to `side_by_side` what a collective
of a trace is: a rank enters it when its backward begins, and leaves it when the backward ends. That gives the offset
of two clocks. How wrong it can be follows from causality alone: no rank ends a step before every rank has begun the
step's last backward, which waits for the gradients of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import polars as pl

from stepscope.analysis.ranks.side_by_side import Matched, Stragglers, clock_alignment, stragglers
from stepscope.analysis.structure.links import Share
from stepscope.trace.recording import StepSample

_TIMED = ("clean", "free")  # windows in which nothing but the steps is measured
_AFTER = "optimizer"
_PASSES = ("forward", "backward", _AFTER, "unattributed")
_LATE_SHARE = 0.25  # of the steps: a rank that is last less often takes turns with others
_BEFORE = ("data", "loader_start", "before_forward", "forward", "before_backward")  # of a step's last backward
_ROUNDING_NS = 1_200_000  # two histories have the time of day in milliseconds, each read within 0.1 ms
_DRIFT = 1e-4  # clocks of two hosts drift apart more slowly: crystals are good to 50 ppm or better


@dataclass(frozen=True)
class RankSteps:
    """The timed steps of one rank, reduced to what is compared."""

    rank: int
    host: str | None
    day_ns: int | None  # time of day minus the clock of the steps; None if the recording does not have it
    is_on_gpu: bool
    calls: pl.DataFrame
    """`step`; `start_ns`, `end_ns`: of the backward, with its collectives. `enter_ns` is not after the
    beginning of its last backward, `leave_ns` not before its end."""
    phases_ns: Mapping[str, float]  # host, mean of a step
    device_ns: Mapping[str, float]  # GPU, mean of a step; empty without one
    step_ns: float  # median


@dataclass(frozen=True)
class Late:
    """A rank that others wait for."""

    rank: int
    host: str | None
    num_last: int  # steps in which it came last by more than the spread of the ends
    last_share: float  # of all steps
    caused_wait_ns: int  # of the other ranks together
    phase: str | None  # what takes it longer than the other ranks; None if nothing does
    excess_ns: float  # how much longer per step, than the median rank
    where: str  # `host` or `GPU`; `unknown` if no phase is longer


@dataclass(frozen=True)
class JobClocks:
    """The clocks of a job's ranks, and who is late."""

    clocks: pl.DataFrame
    """One row per rank: `rank`, `reference` (the lowest), `num_calls` (steps). `offset_ns`: its clock minus the
    reference's, the median difference of the ends; `spread_ns`: their inter-quartile range. `earliest_ns`,
    `latest_ns`: the causal bounds of the offset at the last step; `uncertainty_ns`: the larger distance of the offset
    from them. `is_contradicted`: no offset fits all steps, so the bounds are those of the last `num_agreeing` steps.
    `skew_ns`, `skew_uncertainty_ns`: the same for the hosts' time of day."""
    hosts: Mapping[int, str | None]
    stragglers: Stragglers
    late: tuple[Late, ...]
    num_steps: int


def rank_steps(
    rank: int, samples: Sequence[StepSample], most: int, day_ns: int | None, host: str | None = None
) -> RankSteps | None:
    """Return the last `most` timed steps of a rank, reduced; None if it has none."""
    timed = [each for each in samples if each.window in _TIMED][-most:]
    if not timed:
        return None
    rows = []
    for each in timed:
        end_ns = each.end_ns - each.host_ns.get(_AFTER, 0)
        inside_ns = each.host_ns.get("backward") or each.host_ns.get("unattributed") or 0
        enter_ns = each.start_ns + sum(each.host_ns.get(name, 0) for name in _BEFORE)
        rows.append((each.step, end_ns - inside_ns, end_ns, enter_ns, each.end_ns))
    split = [each for each in timed if "unattributed" not in each.host_ns] or timed
    names = dict.fromkeys(name for each in split for name in each.host_ns)
    on_gpu = [each.device_ns for each in split if each.device_ns]
    return RankSteps(
        rank,
        host,
        day_ns,
        bool(on_gpu),
        pl.DataFrame(rows, schema=["step", "start_ns", "end_ns", "enter_ns", "leave_ns"], orient="row"),
        {name: fmean(each.host_ns.get(name, 0) for each in split) for name in names},
        {name: fmean(each.get(name, 0) for each in on_gpu) for name in dict.fromkeys(n for o in on_gpu for n in o)},
        median(each.wall_ns for each in timed),
    )


def job_clocks(ranks: Sequence[RankSteps]) -> JobClocks | None:
    """Return the clocks of ranks that have steps in common; None if there are not two."""
    if len(ranks) < 2:
        return None
    calls = pl.concat([each.calls.with_columns(rank=pl.lit(each.rank, pl.Int64)) for each in ranks])
    calls = calls.filter(pl.col("rank").n_unique().over("step") == len(ranks)).sort("step", "rank")
    if calls.is_empty():
        return None
    matched = _matched(calls, tuple(sorted(each.rank for each in ranks)))
    is_known = all(each.day_ns is not None for each in ranks)
    aligned = clock_alignment(matched, {each.rank: each.day_ns or 0 for each in ranks} if is_known else None)
    # Half of the steps lie within the spread that `clock_alignment` states: twice as much has nearly all.
    spread = 2 * pl.col("uncertainty_ns")
    ahead_ns = 0
    if any(each.is_on_gpu for each in ranks):  # the host runs ahead of its GPU, and does not wait in the backward
        ahead_ns = round(max(each.step_ns for each in ranks))
        spread = pl.max_horizontal(spread, pl.lit(ahead_ns))
    aligned = aligned.with_columns(spread.alias("uncertainty_ns"))
    num_steps = calls["step"].n_unique()
    skew = pl.col("skew_ns") + pl.col("offset_ns") - aligned["offset_ns"]
    clocks = _bounded(aligned, _causal_bounds(calls, ahead_ns)).with_columns(
        num_calls=pl.lit(num_steps, pl.Int64),
        skew_ns=skew if is_known else pl.lit(None, pl.Int64),
        skew_uncertainty_ns=pl.col("uncertainty_ns") + (_ROUNDING_NS if is_known else 0),
    )
    # Causality alone cannot show a rank that is late in every step: that ranks leave a step together does.
    found = stragglers(matched, aligned)
    hosts = {each.rank: each.host for each in ranks}
    return JobClocks(clocks, hosts, found, _late(ranks, found, num_steps), num_steps)


def _matched(calls: pl.DataFrame, ranks: tuple[int, ...]) -> Matched:
    """Return the steps as collectives, to compare them as those of a trace."""
    calls = calls.select(
        call=pl.col("step").rank("dense").cast(pl.Int64) - 1,
        group=pl.lit("0"),
        group_size=pl.lit(len(ranks), pl.Int64),
        collective=pl.lit("all_reduce"),
        step="step",
        rank="rank",
        bytes=pl.lit(None, pl.Int64),
        start_ns="start_ns",
        end_ns="end_ns",
        duration_ns=pl.col("end_ns") - pl.col("start_ns"),
    )
    none = pl.DataFrame(schema={"rank": pl.Int64, "reason": pl.String, "num_kernels": pl.Int64})
    return Matched(calls, none, Share(0, calls.height), ranks)


def _causal_bounds(calls: pl.DataFrame, ahead_ns: int) -> pl.DataFrame:
    """Return the bounds of each rank's offset to the lowest rank, at the last step: `earliest_ns` and `latest_ns`.

    Each step bounds the offset both ways, as a message and its answer do: the rank entered before the lowest rank
    left, and the lowest rank entered before the rank left. The offset lies in the intersection. The bounds of older
    steps are widened by `_DRIFT`, and all by `ahead_ns`. If steps contradict each other, those from the last one back
    to the contradiction count (`num_agreeing`).
    """
    lowest = calls.filter(pl.col("rank") == pl.col("rank").min()).select(
        "step", first_enter="enter_ns", first_leave="leave_ns"
    )
    age_ns = pl.col("first_leave").max() - pl.col("first_enter")
    wider = (_DRIFT * age_ns).ceil().cast(pl.Int64) + ahead_ns + 1  # 1: times are whole nanoseconds
    low, high = pl.col("enter_ns") - pl.col("first_leave") - wider, pl.col("leave_ns") - pl.col("first_enter") + wider
    return (
        calls.join(lowest, on="step")
        .sort("rank", "step", descending=[False, True])
        .select(
            "rank",
            earliest_ns=low.cum_max().over("rank"),
            latest_ns=high.cum_min().over("rank"),
            num_steps=pl.len().over("rank"),
        )
        .filter(pl.col("earliest_ns") <= pl.col("latest_ns"))
        .group_by("rank")
        .agg(
            pl.col("earliest_ns").last(),
            pl.col("latest_ns").last(),
            num_agreeing=pl.len().cast(pl.Int64),
            is_contradicted=pl.len() < pl.col("num_steps").first(),
        )
    )


def _bounded(aligned: pl.DataFrame, bounds: pl.DataFrame) -> pl.DataFrame:
    """Return the clocks with the offset inside its causal bounds, and its distance from them as uncertainty."""
    offset, low, high = pl.col("offset_ns"), pl.col("earliest_ns"), pl.col("latest_ns")
    is_first = pl.col("rank") == pl.col("reference")
    return (
        aligned.rename({"uncertainty_ns": "spread_ns"})
        .drop("earliest_ns", "latest_ns", "is_contradicted")
        .join(bounds, on="rank", maintain_order="left")
        .with_columns(
            pl.when(is_first).then(0).otherwise(bound).alias(bound.meta.output_name()) for bound in (low, high)
        )
        .with_columns(offset.clip(low, high))
        .with_columns(uncertainty_ns=pl.max_horizontal(offset - low, high - offset))
    )


def _late(ranks: Sequence[RankSteps], found: Stragglers, num_steps: int) -> tuple[Late, ...]:
    made = []
    by_rank = {each.rank: each for each in ranks}
    for row in found.ranks.sort("caused_wait_ns", descending=True).iter_rows(named=True):
        if row["num_last_certain"] < _LATE_SHARE * num_steps:
            continue
        own = by_rank[row["rank"]]
        # A backward that waits for others is not what makes a rank late.
        excess = {
            name: ns - median(each.phases_ns.get(name, 0.0) for each in ranks)
            for name, ns in own.phases_ns.items()
            if name != "backward"
        }
        phase, longest = max(excess.items(), key=lambda each: each[1], default=(None, 0.0))
        if phase is None or longest <= 0:
            phase, where, longest = None, "unknown", 0.0
        else:
            on_gpu = own.device_ns.get(phase, 0.0) - median(each.device_ns.get(phase, 0.0) for each in ranks)
            where = "GPU" if phase in _PASSES and on_gpu * 2 > longest else "host"
        made.append(
            Late(row["rank"], own.host, row["num_last_certain"], row["num_last_certain"] / num_steps,
                 row["caused_wait_ns"], phase, longest, where)
        )  # fmt: skip
    return tuple(made)
