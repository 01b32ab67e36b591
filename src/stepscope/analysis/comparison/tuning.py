"""Figures of a tuning: the frontier, the best point, and its gain over the defaults."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.analysis.comparison.significance import MIN_SAMPLES, difference
from stepscope.analysis.comparison.sweeps import OK, Limits, PointSummary, known_limits, sweep_of
from stepscope.analysis.time.statistics import quantile
from stepscope.display import Shown

AGAIN, BESIDE = "again", "beside"
SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One point of a tuning."""

    hash: str
    status: str  # as in `stepscope bench`; only `ok` is ranked. `wrong`: failed the gate, or a deviating loss.
    reason: str | None
    turned: Mapping[str, Any]  # knobs that differ from the defaults → their values
    round: int  # the search round that tried it first; 0 for the defaults and reference losses
    is_pruned: bool  # its plan excluded it from being run
    predicted_bytes: int | None  # memory predicted by its plan; null if not planned
    per_s: float | None
    """Tokens per second (steps without tokens) at the median; for points not measured again, corrected for the
    machine's drift."""
    time_ns: float | None  # the median step
    num_samples: int
    is_measured_again: bool  # its figures are from the final measurements, interleaved with the other contenders
    memory_bytes: int | None
    """Its peak: reserved on a GPU, of tensors on a CPU; of the process for a whole step of your own on a CPU."""
    mfu_share: float | None
    mfu_limit: str | None
    loss: float | None  # of the very first call
    plain_loss: float | None  # the same for the plainest variant
    loss_deviation: float | None  # the worse of the first and the last step's loss, as a share; see docs/tune.md
    loss_tolerance: float | None
    loss_unchecked: str | None  # why the loss could not be checked; null if it was
    is_on_frontier: bool = False


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much faster one point is than another, per token."""

    over: str  # the other's hash
    speedup: float  # speed ÷ the other's, at the medians
    low: float  # lower end of its 95 % bootstrap interval
    high: float
    p_value: float  # two-sided Mann–Whitney test
    is_significant: bool
    is_measured_again: bool
    """Both were measured again, interleaved; else these are the search's samples, from which the best was picked."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuning(Shown):
    """The result of `stepscope tune`; `--json` prints this."""

    workload: str
    preset: str | None
    device_name: str | None
    unit: str  # unit of `per_s`: `tokens` or `steps`
    budget_bytes: int | None  # the memory limit that was given; null: the device's memory
    defaults: Tried | None
    best: Tried | None
    """The fastest correct point: the defaults, unless another is certainly faster; null if nothing was correct."""
    gain: Gain | None  # the best over the defaults; null if they are the best or not correct, or with too few samples
    runner_up: Tried | None
    lead: Gain | None  # the best over the runner-up
    frontier: tuple[Tried, ...]
    """Points that no other beats in both speed and memory, by memory; of those measured again."""
    points: tuple[Tried, ...]  # all, in the order they were tried
    moves: tuple[Mapping[str, Any], ...]
    """The path of the search: `round`, `turned`, `before`, `gain` (speed ÷ the speed before)."""
    not_tried: tuple[Mapping[str, Any], ...]  # `round`, `turned`, `reason`
    axes: Mapping[str, Sequence[Any] | None]  # searched knobs → their values; null: powers of two
    num_rounds: int
    stopped: str  # `settled`: a whole round gained nothing; `time`; `stuck`: nothing was correct; `interrupted`
    seconds: float
    limit_s: float
    command: str | None  # measures the best point again
    num_by_status: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # remarks, such as points that could not be planned, and why


def tuning_of(
    rows: Iterable[Mapping[str, Any]],
    environments: Mapping[str, Mapping[str, Any]],
    log: Mapping[str, Any],
    limits: Limits = known_limits,
) -> Tuning:
    rows = list(rows)
    summaries = dict(zip((row["hash"] for row in rows), sweep_of(rows, environments, limits).points))
    first = [row for row in rows if row["tune"]["role"] not in (AGAIN, BESIDE)]
    base = next((row for row in first if row["hash"] == log["defaults"]), None)
    last = _final_samples(rows, log["contenders"])
    drift = 1.0  # how much slower the machine was at the end of the search than at its start, from the defaults
    if base is not None and base["status"] == OK and last.get(base["hash"]):
        drift = quantile(sorted(last[base["hash"]]), 0.5) / quantile(sorted(base["samples_device_ns"]), 0.5)
    samples = {row["hash"]: _samples(row, last, drift) for row in first}
    points = [_tried(row, base, summaries[row["hash"]], samples[row["hash"]]) for row in first]
    # Among many points measured once, the fastest look faster than they are.
    frontier = _frontier([point for point in points if point.is_measured_again] or points)
    on_it = {point.hash for point in frontier}
    points = [replace(point, is_on_frontier=point.hash in on_it) for point in points]
    right = sorted((p for p in points if p.status == OK and p.per_s), key=_by_speed)
    ranked = [point for point in right if point.is_measured_again] or right
    defaults = next((point for point in points if point.hash == log["defaults"]), None)
    best = ranked[0] if ranked else None
    gain = _gain(best, defaults, samples)
    if gain is not None and not gain.is_significant:
        best, gain = defaults, None
    runner_up = next((p for p in ranked if best and p.hash not in (best.hash, log["defaults"])), None)
    one = base or (first[0] if first else {})
    given = ("workload", "preset", "budget_bytes", "axes", "num_rounds", "stopped", "seconds", "limit_s")
    return Tuning(
        **{name: log[name] for name in given},
        device_name=next((s.device_name for s in summaries.values() if s.device_name), None),
        unit="tokens" if one.get("num_tokens") else "steps",
        defaults=defaults,
        best=best,
        gain=gain,
        runner_up=runner_up,
        lead=_gain(best, runner_up, samples),
        frontier=tuple(replace(point, is_on_frontier=True) for point in frontier),
        points=tuple(points),
        moves=tuple(log["moves"]),
        not_tried=tuple(log["not_tried"]),
        command=log["commands"].get(best.hash) if best else None,
        num_by_status=dict(Counter(point.status for point in points)),
        notes=tuple(log["notes"]),
    )


_Samples = tuple[list[float], bool]  # nanoseconds per token, or per step, and whether they were measured again


def _final_samples(rows: Sequence[Mapping[str, Any]], contenders: Sequence[str]) -> dict[str, list[float]]:
    """Return the samples of contenders measured again by hash, from rounds that include all of them."""
    among = " ".join(contenders)
    again = [row for row in rows if row["tune"]["role"] == AGAIN and row["tune"]["among"] == among]
    turns = Counter(row["tune"]["round"] for row in again)
    found: dict[str, list[float]] = {}
    for row in again:
        if turns[row["tune"]["round"]] == len(contenders) and row["status"] == OK:
            found.setdefault(row["tune"]["of"], []).extend(row["samples_device_ns"])
    return found


def _samples(row: Mapping[str, Any], last: Mapping[str, list[float]], drift: float) -> _Samples:
    """Return a point's final samples, else the search's samples corrected for drift."""
    tokens = row.get("num_tokens") or 1
    if taken := last.get(row["hash"]):
        return [sample / tokens for sample in taken], True
    scale = row["tune"].get("scale", 1.0) * drift / tokens
    return [sample * scale for sample in row.get("samples_device_ns") or []], False


def _tried(row: Mapping[str, Any], base: Mapping[str, Any] | None, summary: PointSummary, samples: _Samples) -> Tried:
    tune, tokens = row["tune"], row.get("num_tokens") or 1
    loss = tune.get("loss") or {}
    costs_ns, is_again = samples
    cost = quantile(sorted(costs_ns), 0.5) if costs_ns else None
    mfu = summary.mfu
    start = {} if base is None else {**base["config"], **base["run"]}
    peaks = (summary.peak_reserved_bytes, summary.peak_allocated_bytes, summary.peak_resident_bytes)
    return Tried(
        hash=row["hash"],
        status=row["status"],
        reason=row.get("reason"),
        turned={n: v for n, v in {**row["config"], **row["run"]}.items() if n in start and v != start[n]},
        round=tune["round"],
        is_pruned=row["status"] == SKIPPED and tune.get("predicted_bytes") is not None,
        predicted_bytes=tune.get("predicted_bytes"),
        per_s=1e9 / cost if cost else None,
        time_ns=cost * tokens if cost else None,
        num_samples=len(costs_ns),
        is_measured_again=is_again,
        memory_bytes=next((peak for peak in peaks if peak is not None), None),
        # The share follows the time, which may be from the final measurements.
        mfu_share=mfu.share * summary.time.median / (cost * tokens) if mfu and summary.time and cost else None,
        mfu_limit=mfu.limit if mfu else None,
        loss=row.get("loss"),
        plain_loss=loss.get("plain_loss"),
        loss_deviation=loss.get("deviation"),
        loss_tolerance=loss.get("tolerance"),
        loss_unchecked=loss.get("reason") if loss.get("passed") is None else None,
    )


def _by_speed(point: Tried) -> float:
    return -(point.per_s or 0.0)


def _frontier(points: Sequence[Tried]) -> list[Tried]:
    """Return points that no other beats in both speed and memory, the smallest first."""
    right = [p for p in points if p.status == OK and p.per_s and p.memory_bytes is not None]
    ordered = sorted(right, key=lambda point: (point.memory_bytes, _by_speed(point)))
    frontier: list[Tried] = []
    for point in ordered:
        if not frontier or (point.per_s or 0.0) > (frontier[-1].per_s or 0.0):
            frontier.append(point)
    return frontier


def _gain(best: Tried | None, other: Tried | None, samples: Mapping[str, _Samples]) -> Gain | None:
    """Return the gain of the best over another; None if there is nothing to compare."""
    if best is None or other is None or best.hash == other.hash or other.status != OK:
        return None
    (new, is_new_again), (old, is_old_again) = samples[best.hash], samples[other.hash]
    if min(len(new), len(old)) < MIN_SAMPLES:
        return None
    found = difference(old, new)
    return Gain(
        over=other.hash,
        speedup=1 / found.ratio,
        low=1 / found.high,
        high=1 / found.low,
        p_value=found.p_value,
        is_significant=found.is_significant,
        is_measured_again=is_new_again and is_old_again,
    )
