"""Two whole runs side by side: throughput, goodput, loss against step and against time, and where each changes."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low, stdev

from stepscope.analysis.run.drift import step_changes
from stepscope.analysis.run.goodput import Goodput
from stepscope.analysis.run.series import Run, Track

NUM_POINTS = 10
_NEAR_SHARE = 0.05  # of the common range: losses that near stand for a point
_SAME_SHARE = 0.01  # of a step or time: losses that near are compared, because an early loss falls fast
_FEWEST = 4  # differences, to know their spread
_INTERVAL = 1.25 * 2.8  # a median's error, in errors of a mean, and Student's t of so few
_Side = tuple[Sequence[float], Sequence[float]]  # steps or times, and the losses there


@dataclass(frozen=True)
class RunChange:
    """A change of the step time."""

    step: int
    kind: str  # `step` or `drift`
    time_of_day: str
    before_ns: float
    after_ns: float


@dataclass(frozen=True)
class RunFigures:
    """One run from its start to its end."""

    num_steps: int
    wall_ns: int  # since the start
    goodput: float
    rows: dict[str, int]  # what took the time, in ns
    unit: str | None  # `tokens` or `samples`; null if neither was seen
    per_s: float | None  # of them since the start, with everything that is not training
    steps_per_s: float
    changes: tuple[RunChange, ...]


@dataclass(frozen=True)
class LossAt:
    """The losses of both runs after the same number of steps, or the same time."""

    at: float  # a step, or seconds since the start
    base: float  # the median of losses near it that both runs have at the same place
    new: float
    noise: float  # how far apart equal runs may be: losses are of different batches; 0 if they are of the same steps


@dataclass(frozen=True)
class WholeRuns:
    base: RunFigures
    new: RunFigures
    loss_by_step: tuple[LossAt, ...]  # over the steps that both have
    loss_by_time: tuple[LossAt, ...]  # over the time that both have
    have_losses: bool  # whether losses of both were sampled; it need not have been at the same steps


def compare_runs(base: Run, base_time: Goodput, new: Run, new_time: Goodput) -> WholeRuns:
    sides = (base, base_time), (new, new_time)
    losses = [_finite(run.tracks.get("loss")) for run, _ in sides]
    return WholeRuns(
        base=_figures(base, base_time),
        new=_figures(new, new_time),
        loss_by_step=_points(*[(track.steps, track.values) for track in losses]),
        loss_by_time=_points(*[([ns / 1e9 for ns in track.ns], track.values) for track in losses]),
        have_losses=all(track.values for track in losses),
    )


def _figures(run: Run, time: Goodput) -> RunFigures:
    unit, num = ("tokens", time.num_tokens) if time.num_tokens else ("samples", time.num_samples)
    seconds = max(1, time.wall_ns) / 1e9
    changes = tuple(
        RunChange(step, change.kind, run.clock_text(run.ns_of(step)), change.before, change.after)
        for change, step, _ in step_changes(run)
    )
    return RunFigures(
        num_steps=run.num_steps,
        wall_ns=time.wall_ns,
        goodput=time.share,
        rows=dict(time.rows),
        unit=unit if num else None,
        per_s=num / seconds if num else None,
        steps_per_s=run.num_steps / seconds,
        changes=changes,
    )


def _finite(track: Track | None) -> Track:
    known = zip(track.steps, track.ns, track.values) if track is not None else ()
    return Track.of(at for at in known if math.isfinite(at[2]))


def _points(base: _Side, new: _Side) -> tuple[LossAt, ...]:
    """Return both losses over the common range, at places where both were sampled."""
    pairs = _pairs(base, new)
    if not pairs:
        return ()
    first, last = max(base[0][0], new[0][0]), min(base[0][-1], new[0][-1])
    distance = _NEAR_SHARE * (last - first)
    found = []
    for number in range(1, NUM_POINTS + 1):
        at = first + (last - first) * number / NUM_POINTS
        near = [pair for pair in pairs if abs(pair[0] - at) <= distance]
        if near and last > first:
            equal = [pair for pair in near if pair[1] == 0]
            places, _, before, after = zip(*(equal or near))
            noise = 0.0 if equal else _noise([b - a for a, b in zip(before, after)])
            if noise is not None:
                found.append(LossAt(median_low(places), median(before), median(after), noise))
    return tuple(found)


def _noise(differences: Sequence[float]) -> float | None:
    """Return how far from 0 the median of differences between batches may be."""
    if len(differences) < _FEWEST:
        return None
    return _INTERVAL * stdev(differences) / math.sqrt(len(differences))


def _pairs(base: _Side, new: _Side) -> list[tuple[float, float, float, float]]:
    """Return place, distance and both losses of each sample of `base` with one of `new` at nearly the same place."""
    places, values = new
    found = []
    for at, loss in zip(*base):
        right = bisect_left(places, at)
        nearest = min(
            range(max(0, right - 1), min(len(places), right + 1)), key=lambda i: abs(places[i] - at), default=0
        )
        if places and (gap := abs(places[nearest] - at)) <= _SAME_SHARE * at:
            found.append((at, gap, loss, values[nearest]))
    return found
