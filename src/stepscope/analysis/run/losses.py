"""Losses that went wrong: not a number, infinite, or far above those before."""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from stepscope.analysis.run.series import Run

WINDOW = 50  # losses before one that it is compared with
FEWEST = 20
_DEVIATIONS = 8.0  # robust standard deviations above the median, of logarithms where all losses are positive
_LEAST_FACTOR = 1.3
_LEAST_DEVIATIONS = 20.0  # for losses that may be negative: their noise has no scale of its own
_NEW_LEVEL = 10  # so many in a row are no spike


@dataclass(frozen=True)
class Spike:
    """A loss far above the ones before it."""

    step: int
    loss: float
    usual: float  # the median of those before
    lasts: bool  # whether the losses stay there


@dataclass(frozen=True)
class LossAnomaly:
    """What is wrong with the losses of a run."""

    num_losses: int
    num_not_finite: int
    step: int | None  # of the first that is not finite
    value: float | None  # `nan` or `inf`
    recovers: bool  # whether finite ones follow
    spikes: tuple[Spike, ...]  # in order


def loss_anomaly(run: Run) -> LossAnomaly | None:
    """Return what is wrong with the losses; None if nothing is, or none were recorded."""
    track = run.tracks.get("loss")
    if track is None:
        return None
    broken = [i for i, loss in enumerate(track.values) if not math.isfinite(loss)]
    found = _spikes([(s, y) for s, y in zip(track.steps, track.values) if math.isfinite(y)])
    if not broken and not found:
        return None
    first = broken[0] if broken else None
    return LossAnomaly(
        num_losses=len(track.values),
        num_not_finite=len(broken),
        step=None if first is None else track.steps[first],
        value=None if first is None else track.values[first],
        recovers=first is not None and len(broken) < len(track.values) - first,
        spikes=tuple(found),
    )


def _spikes(losses: list[tuple[int, float]]) -> list[Spike]:
    is_positive = all(loss > 0 for _, loss in losses)
    values = [math.log(loss) if is_positive else loss for _, loss in losses]
    recent: deque[float] = deque()
    ordered: list[float] = []
    found: list[Spike] = []
    above: list[int] = []  # the last ones in a row that are too high
    for i, value in enumerate(values):
        if len(ordered) >= FEWEST and value > _limit(ordered, is_positive):
            above.append(i)
            if len(above) < _NEW_LEVEL:
                continue
            middle = ordered[len(ordered) // 2]
            # A gradient scaler doubles the loss as it is passed to backward.
            ratio = (value - middle) / math.log(2) if is_positive else 0.5
            if abs(ratio - round(ratio)) > 0.1:
                found.append(_spike(losses, above, middle, is_positive, lasts=True))
            new = [values[j] for j in above]
            recent, ordered, above = deque(new), sorted(new), []
            continue
        if above:
            found.append(_spike(losses, above, ordered[len(ordered) // 2], is_positive, lasts=False))
            above = []
        recent.append(value)
        insort(ordered, value)
        if len(recent) > WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
    if above:
        found.append(_spike(losses, above, ordered[len(ordered) // 2], is_positive, lasts=True))
    return found


def _limit(ordered: list[float], is_positive: bool) -> float:
    middle = ordered[len(ordered) // 2]
    deviation = 1.4826 * sorted(abs(value - middle) for value in ordered)[len(ordered) // 2]
    if is_positive:
        return middle + max(_DEVIATIONS * deviation, math.log(_LEAST_FACTOR))
    return middle + max(_LEAST_DEVIATIONS * deviation, (_LEAST_FACTOR - 1) * abs(middle))


def _spike(losses: list[tuple[int, float]], above: list[int], middle: float, is_positive: bool, lasts: bool) -> Spike:
    step, loss = max((losses[i] for i in above), key=lambda each: each[1])
    step = losses[above[0]][0] if lasts else step
    return Spike(step, loss, math.exp(middle) if is_positive else middle, lasts)
