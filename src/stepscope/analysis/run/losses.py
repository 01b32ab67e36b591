"""Losses that went wrong: not a number, infinite, or far above those before."""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from stepscope.analysis.run.series import Run

WINDOW = 50  # losses before one that show their spread
FEWEST = 20
_LAST = 5  # losses before one that show their level
_SPACING_NS, _SPACING_SHARE = 900_000_000, 0.01  # so far apart, at least: those of the windows are of every step
_DEVIATIONS = 8.0  # robust standard deviations above the median, of logarithms where all losses are positive
_LEAST_FACTOR = 1.3
# A jump even if the losses have fallen by more than that before: this factor above the last ones, and several times
# as far as the largest rise from one loss to the next.
_LARGE_FACTOR, _LARGE_RISES, _FEWEST_BEFORE = 20.0, 3.0, 8
_LEAST_DEVIATIONS = 20.0  # for losses that may be negative: their noise has no scale of its own
_NEW_LEVEL = 10  # so many in a row are no spike
# A loss that soon falls again undoes nothing as long as it stays below this share of the first losses: where a model
# has learned its data, a single hard batch is many times the others.
_LEAST_OF_FIRST = 0.05


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
    finite_step: int | None  # of the last finite one before it
    value: float | None  # `nan` or `inf`
    recovers: bool  # whether finite ones follow
    spikes: tuple[Spike, ...]  # in order


def loss_anomaly(run: Run) -> LossAnomaly | None:
    """Return what is wrong with the losses; None if nothing is, or none were recorded."""
    track = run.tracks.get("loss")
    if track is None:
        return None
    broken = [i for i, loss in enumerate(track.values) if not math.isfinite(loss)]
    spacing_ns = min(_SPACING_NS, _SPACING_SHARE * (track.ns[-1] - track.ns[0])) if track.ns else 0
    finite = [at for at in zip(track.steps, track.ns, track.values) if math.isfinite(at[2])]
    found = _spikes([(step, loss) for step, _, loss in finite], _apart([ns for _, ns, _ in finite], spacing_ns))
    if not broken and not found:
        return None
    first = broken[0] if broken else None
    return LossAnomaly(
        num_losses=len(track.values),
        num_not_finite=len(broken),
        step=None if first is None else track.steps[first],
        finite_step=track.steps[first - 1] if first else None,
        value=None if first is None else track.values[first],
        recovers=first is not None and len(broken) < len(track.values) - first,
        spikes=tuple(found),
    )


def _apart(times_ns: list[int], spacing_ns: float) -> list[bool]:
    """Return which losses count for those after them: one of each stretch of time, however many were sampled."""
    found, last_ns = [], -math.inf
    for ns in times_ns:
        found.append(ns - last_ns >= spacing_ns)
        last_ns = ns if found[-1] else last_ns
    return found


def _spikes(losses: list[tuple[int, float]], is_apart: list[bool]) -> list[Spike]:
    is_positive = all(loss > 0 for _, loss in losses)
    values = [math.log(loss) if is_positive else loss for _, loss in losses]
    before = _Before(is_positive)
    found: list[Spike] = []
    above: list[int] = []  # the last ones in a row that are too high
    least = _LEAST_OF_FIRST * median(loss for _, loss in losses[:_LAST]) if is_positive and losses else -math.inf
    for i, value in enumerate(values):
        if before.is_far_below(value):
            above.append(i)
            if len(above) < _NEW_LEVEL:
                continue
            middle = before.level
            # A gradient scaler doubles the loss as it is passed to backward.
            ratio = (value - middle) / math.log(2) if is_positive else 0.5
            if abs(ratio - round(ratio)) > 0.1:
                found.append(_spike(losses, above, middle, is_positive, lasts=True))
            before = _Before(is_positive)
            for j in above:
                before.add(values[j])
            above = []
            continue
        if above:
            spike = _spike(losses, above, before.level, is_positive, lasts=False)
            found += [spike] if spike.loss >= least else []
            above = []
        if is_apart[i]:
            before.add(value)
    if above:
        found.append(_spike(losses, above, before.level, is_positive, lasts=True))
    return found


class _Before:
    """The losses before one, as logarithms if all are positive."""

    def __init__(self, is_positive: bool) -> None:
        self._is_positive = is_positive
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        self._recent.append(value)
        insort(self._ordered, value)
        if len(self._recent) > WINDOW:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]

    @property
    def level(self) -> float:
        """The median of the last ones, which those of another time do not outweigh."""
        return median(list(self._recent)[-_LAST:])

    def is_far_below(self, value: float) -> bool:
        if len(self._ordered) >= FEWEST and value > self._limit():
            return True
        if not self._is_positive or len(self._ordered) < _FEWEST_BEFORE:
            return False
        above = value - self.level
        if above <= math.log(_LARGE_FACTOR):
            return False
        return above > _LARGE_RISES * max(later - earlier for earlier, later in pairwise(self._recent))

    def _limit(self) -> float:
        """Return the limit for losses that stay at a level."""
        middle = median(self._ordered)
        deviation = 1.4826 * median(abs(value - middle) for value in self._ordered)
        if self._is_positive:
            return middle + max(_DEVIATIONS * deviation, math.log(_LEAST_FACTOR))
        return middle + max(_LEAST_DEVIATIONS * deviation, (_LEAST_FACTOR - 1) * abs(middle))


def _spike(losses: list[tuple[int, float]], above: list[int], middle: float, is_positive: bool, lasts: bool) -> Spike:
    step, loss = max((losses[i] for i in above), key=lambda each: each[1])
    step = losses[above[0]][0] if lasts else step
    return Spike(step, loss, math.exp(middle) if is_positive else middle, lasts)
