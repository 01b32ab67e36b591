"""Clocks and stragglers of a whole run, from the steps that every rank timed: no trace is needed.

Ranks that train together leave each step's last collective together. So a step is to `side_by_side` what a collective
of a trace is: a rank enters it when its backward begins, and leaves it when the backward ends.
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
_ROUNDING_NS = 1_000_000  # a history has the time of day in milliseconds


@dataclass(frozen=True)
class RankSteps:
    """The timed steps of one rank, reduced to what is compared."""

    rank: int
    host: str | None
    day_ns: int | None  # time of day minus the clock of the steps; None if the recording does not have it
    is_on_gpu: bool
    calls: pl.DataFrame  # `step`, `start_ns`, `end_ns`: of the backward, with its collectives
    phases_ns: Mapping[str, float]  # host, mean of a step
    device_ns: Mapping[str, float]  # GPU, mean of a step; empty without one
    step_ns: float  # median


@dataclass(frozen=True)
class Late:
    """A rank that others wait for."""

    rank: int
    host: str | None
    num_last: int  # steps in which it came last by more than the clocks' uncertainty
    last_share: float  # of all steps
    caused_wait_ns: int  # of the other ranks together
    phase: str | None  # what takes it longer than the other ranks; None if nothing does
    excess_ns: float  # how much longer per step, than the median rank
    where: str  # `host` or `GPU`; `unknown` if no phase is longer


@dataclass(frozen=True)
class JobClocks:
    """The clocks of a job's ranks, and who is late."""

    clocks: pl.DataFrame  # as `clock_alignment`; `skew_ns` is of the hosts' time of day
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
        rows.append((each.step, end_ns - inside_ns, end_ns))
    split = [each for each in timed if "unattributed" not in each.host_ns] or timed
    names = dict.fromkeys(name for each in split for name in each.host_ns)
    on_gpu = [each.device_ns for each in split if each.device_ns]
    return RankSteps(
        rank,
        host,
        day_ns,
        bool(on_gpu),
        pl.DataFrame(rows, schema=["step", "start_ns", "end_ns"], orient="row"),
        {name: fmean(each.host_ns.get(name, 0) for each in split) for name in names},
        {name: fmean(each.get(name, 0) for each in on_gpu) for name in dict.fromkeys(n for o in on_gpu for n in o)},
        median(each.wall_ns for each in timed),
    )


def job_clocks(ranks: Sequence[RankSteps]) -> JobClocks | None:
    """Return the clocks of ranks that have steps in common; None if there are not two."""
    frames = [each.calls.with_columns(rank=pl.lit(each.rank, pl.Int64)) for each in ranks]
    calls = pl.concat(frames) if frames else pl.DataFrame()
    if calls.is_empty():
        return None
    calls = calls.filter(pl.col("rank").n_unique().over("step") == len(ranks)).sort("step", "rank")
    if calls.is_empty() or len(ranks) < 2:
        return None
    whole = pl.lit(None, pl.Int64)
    calls = calls.select(
        call=pl.col("step").rank("dense").cast(pl.Int64) - 1,
        group=pl.lit("0"),
        group_size=pl.lit(len(ranks), pl.Int64),
        collective=pl.lit("all_reduce"),
        step="step",
        rank="rank",
        bytes=whole,
        start_ns="start_ns",
        end_ns="end_ns",
        duration_ns=pl.col("end_ns") - pl.col("start_ns"),
    )
    none = pl.DataFrame(schema={"rank": pl.Int64, "reason": pl.String, "num_kernels": pl.Int64})
    matched = Matched(calls, none, Share(0, calls.height), tuple(sorted(each.rank for each in ranks)))
    is_known = all(each.day_ns is not None for each in ranks)
    clocks = clock_alignment(matched, {each.rank: each.day_ns or 0 for each in ranks} if is_known else None)
    # Half of the steps lie within the spread that `clock_alignment` states. But hosts leave a step one after the
    # other, perhaps always in the same order: twice as much covered the error with clocks of known offset.
    clocks = clocks.with_columns(2 * pl.col("uncertainty_ns"))
    if any(each.is_on_gpu for each in ranks):  # the host may run ahead of its GPU, by about a step
        least = round(max(each.step_ns for each in ranks))
        clocks = clocks.with_columns(pl.max_horizontal("uncertainty_ns", pl.lit(least)).alias("uncertainty_ns"))
    rounding = _ROUNDING_NS if is_known else 0
    clocks = clocks.with_columns(
        skew_ns=pl.col("skew_ns") if is_known else pl.lit(None, pl.Int64),
        skew_uncertainty_ns=pl.col("uncertainty_ns") + rounding,
    )
    found = stragglers(matched, clocks)
    num_steps = calls["step"].n_unique()
    return JobClocks(
        clocks, {each.rank: each.host for each in ranks}, found, _late(ranks, found, num_steps), num_steps
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
        phase = max(excess, key=lambda name: excess[name], default=None)
        if phase is None or excess[phase] <= 0:
            phase, where, longest = None, "unknown", 0.0
        else:
            longest = excess[phase]
            on_gpu = own.device_ns.get(phase, 0.0) - median(each.device_ns.get(phase, 0.0) for each in ranks)
            where = "GPU" if phase in _PASSES and on_gpu * 2 > longest else "host"
        made.append(
            Late(row["rank"], own.host, row["num_last_certain"], row["num_last_certain"] / num_steps,
                 row["caused_wait_ns"], phase, longest, where)
        )  # fmt: skip
    return tuple(made)
