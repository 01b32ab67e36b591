"""Where a noisy series changes: to another level at once (`step`), or slowly from some point on (`drift`).

Ranks find where a level changes, so that outliers count no more than other values. Whether the change is real is
decided by low quartiles of stretches, not by a test that takes values for independent: on a busy machine they wander,
and wander together. A change is kept only if the stretches after it lie clearly apart from those before it. The time
is n log n; more than `MOST_POINTS` values are first reduced to medians of neighbors.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Literal

from stepscope.analysis.run.segmented import DECISIVE, HALF_CHI_SQUARE, advantage, growth, levels, num_independent
from stepscope.analysis.time.statistics import quantile

STEP: Literal["step"] = "step"
DRIFT: Literal["drift"] = "drift"
MOST_POINTS = 1024
FEWEST = 24  # values; with less there is nothing to compare
LEAST_SHARE = 0.05  # of the level before; less does not matter
SHORTEST_SHARE = 0.1  # of the series on each side of a change; shorter ones are bursts
_STRETCHES = 8  # of the shorter side, which are compared
_OUTLYING = 0.13  # of the stretches on a side may be like the other side
_GAP = 0.5  # of the change: the distance between the stretches of both sides
_RANK_STATISTIC = 4.5  # standard deviations of the sum of ranks, if values were independent
MOST_STRETCHES = 100  # that a slow change is fitted to


@dataclass(frozen=True)
class Noise:
    """What a series must show in spite of its noise."""

    quantile: float  # that stands for a stretch
    concordant: float  # Kendall's tau of the stretches from the begin of a slow change on


ONE_SIDED, EVEN = Noise(0.25, 0.6), Noise(0.5, 0.4)


@dataclass(frozen=True)
class Change:
    """One change of a series."""

    kind: Literal["step", "drift"]
    index: int  # of the first value after a step, or where the drift begins
    end: int  # where the new level or the drift ends: at the next change, or with the series
    before: float  # the level before
    after: float  # the level from `index` on; of a drift, where it has arrived at `end`
    low: int = 0  # where it begins, at the earliest and at the latest (95 %)
    high: int = 0

    @property
    def share(self) -> float:
        """The change as a share of the level before."""
        return (self.after - self.before) / self.before if self.before else 0.0


def changes(values: Sequence[float], is_one_sided: bool = True) -> tuple[Change, ...]:
    """Return the changes of a series in order; none if it is short, or noise could be the reason.

    `is_one_sided` is noise that only makes values larger, for as long as it likes, as other processes do.

    >>> [(each.kind, each.index, each.after) for each in changes([10.0, 11.0] * 50 + [20.0, 21.0] * 50)]
    [('step', 100, 20.5)]
    """
    group = -(-len(values) // MOST_POINTS)
    points = [median(values[i : i + group]) for i in range(0, len(values), group)] if group > 1 else list(values)
    if len(points) < FEWEST:
        return ()
    found = _changes(points, ONE_SIDED if is_one_sided else EVEN)
    return tuple(
        replace(
            each,
            index=each.index * group,
            end=min(len(values), each.end * group),
            low=each.low * group,
            high=min(len(values) - 1, (each.high + 1) * group - 1),
        )
        for each in found
    )


def level_changes(values: Sequence[float], noise: Noise) -> list[int]:
    """Return where the level of a series changes at once: the indices of the first values after each change."""
    if len(values) < FEWEST:
        return []
    shortest = max(FEWEST // 4, round(SHORTEST_SHARE * len(values)))
    cuts: list[int] = []
    pending = [(0, len(values))]
    while pending:
        begin, end = pending.pop()
        best: tuple[float, int] | None = None
        for left, right in _seeded(begin, end, 2 * shortest):
            score, index = _rank_split(values[left:right], shortest)
            if score > max(_RANK_STATISTIC, best[0] if best else 0.0) and _is_apart(
                values[left : left + index], values[left + index : right], noise
            ):
                best = score, left + index
        if best is not None:
            cut = _refined(values, begin, best[1], end, shortest)
            cuts.append(cut)
            pending += [(begin, cut), (cut, end)]
    return _confirmed(values, sorted(cuts), noise)


def _seeded(begin: int, end: int, shortest: int) -> Iterator[tuple[int, int]]:
    """Yield overlapping intervals of every length: a change that is soon undone is clear only in a short one."""
    length = float(end - begin)
    while length >= shortest:
        num = max(1, round(2 * (end - begin - length) / length) + 1)
        for i in range(num):
            left = begin + round(i * (end - begin - length) / max(1, num - 1))
            yield left, min(end, left + round(length))
        length /= 2**0.5


def _rank_split(values: Sequence[float], shortest: int) -> tuple[float, int]:
    """Return the index that splits values into the most different two parts by rank, and how different they are."""
    num = len(values)
    if num < 2 * shortest:
        return 0.0, 0
    order = sorted(range(num), key=values.__getitem__)
    ranks = [0.0] * num
    i = 0
    while i < num:  # equal values share their rank
        j = i
        while j < num and values[order[j]] == values[order[i]]:
            j += 1
        for k in order[i:j]:
            ranks[k] = (i + j - 1) / 2 - (num - 1) / 2
        i = j
    sums = list(accumulate(ranks))
    scale = (sum(rank * rank for rank in ranks) / num) ** 0.5
    if not scale:
        return 0.0, 0
    return max(
        (abs(sums[k - 1]) / (scale * (k * (num - k) / num) ** 0.5), k) for k in range(shortest, num - shortest + 1)
    )


def _is_apart(before: Sequence[float], after: Sequence[float], noise: Noise) -> bool:
    """Return whether the stretches of one side lie clearly apart from those of the other."""
    change = median(after) - median(before)
    if abs(change) < LEAST_SHARE * abs(median(before)) or not change:
        return False
    length = max(1, min(len(before), len(after)) // _STRETCHES)
    sides = [sorted(stretches(side, length, noise.quantile)) for side in (before, after)]
    low, high = sides if change > 0 else sides[::-1]
    return quantile(high, _OUTLYING) - quantile(low, 1 - _OUTLYING) >= _GAP * abs(change)


def _refined(values: Sequence[float], begin: int, cut: int, end: int, shortest: int) -> int:
    """Return where the level changes best: values that are closer to the other side's level count against it."""
    # Only the neighborhood: farther away there may be another change.
    begin, end = (max(begin, cut - 3 * shortest), min(end, cut + 3 * shortest))
    low, high = median(values[begin:cut]), median(values[cut:end])
    most = abs(high - low)
    costs = [min(abs(value - low), most) - min(abs(value - high), most) for value in values[begin:end]]
    sums = [0.0, *accumulate(costs)]
    first, last = min(shortest, cut - begin), max(end - begin - shortest, cut - begin)
    return begin + min(range(first, last + 1), key=sums.__getitem__)


def _confirmed(values: Sequence[float], cuts: list[int], noise: Noise) -> list[int]:
    """Return the cuts that also hold between their neighbors."""
    while cuts:
        ends = [0, *cuts, len(values)]
        weak = [
            (abs(median(values[a:k]) - median(values[k:b])), k)
            for a, k, b in zip(ends, cuts, ends[2:])
            if not _is_apart(values[a:k], values[k:b], noise)
        ]
        if not weak:
            break
        cuts.remove(min(weak)[1])
    return cuts


def stretches(values: Sequence[float], length: int, share: float = 0.25) -> list[float]:
    """Return a quantile of each stretch of at least `length` values."""
    num = max(1, len(values) // length)
    ends = [round(i * len(values) / num) for i in range(num + 1)]
    return [quantile(sorted(values[a:b]), share) for a, b in pairwise(ends)]


def _changes(values: Sequence[float], noise: Noise) -> list[Change]:
    cuts = level_changes(values, noise)
    ends = [0, *cuts, len(values)]
    at = [median(values[a:b]) for a, b in pairwise(ends)]
    steps = [
        Change(STEP, cut, ends[i + 2], at[i], at[i + 1], *_interval(values, ends[i], cut, ends[i + 2]))
        for i, cut in enumerate(cuts)
    ]
    if (slow := _drift(values, noise, steps)) is not None:
        return [slow]
    found = []
    for a, b, step in zip(ends, ends[1:], [None, *steps]):
        found += [step] if step is not None else []
        # A level that lasts may drift by itself.
        if cuts and b - a >= 0.4 * len(values) and (slow := _drift(values[a:b], noise, [])) is not None:
            moved = {name: a + getattr(slow, name) for name in ("index", "end", "low", "high")}
            found.append(replace(slow, **moved))
    return found


def _interval(values: Sequence[float], begin: int, cut: int, end: int) -> tuple[int, int]:
    """Return the first and the last value at which a level may change, with 95 %."""
    low, high = median(values[begin:cut]), median(values[cut:end])
    residuals = [*(value - low for value in values[begin:cut]), *(value - high for value in values[cut:end])]
    most = max(1e-300, sum(map(abs, residuals))) * HALF_CHI_SQUARE / num_independent(residuals)
    costs = list(accumulate((abs(value - low) - abs(value - high) for value in values[begin:end]), initial=0.0))
    near = [begin + k for k, cost in enumerate(costs) if cost <= costs[cut - begin] + most]
    return min(*near, cut), max(*near, cut)


def _drift(values: Sequence[float], noise: Noise, steps: Sequence[Change]) -> Change | None:
    """Return the slow change that explains a series better than `steps` and any other levels; None if none does."""
    points = stretches(values, max(1, len(values) // MOST_STRETCHES), noise.quantile)
    num = len(points)
    if num < FEWEST or min(points) == max(points):
        return None
    fit, num_values = growth(points, num - num // 4)
    rise = fit.value(num - 1) - fit.level
    if abs(rise) < LEAST_SHARE * abs(fit.level) or abs(tau(points[fit.at :])) < noise.concordant:
        return None
    scale = len(values) / num
    known = sum(abs(y - at) for y, at in zip(points, _level_at(steps, values, scale, num)))
    constant, *others = levels(points, max(2, round(SHORTEST_SHARE * num)))
    others.append((known, 1 + 2 * len(steps)))
    floor = 1e-9 * sum(map(abs, points))
    over = [advantage((fit.cost, 3), rival, num_values, floor) for rival in (constant, *others)]
    if over[0] <= DECISIVE or min(over) <= 0:
        return None
    ends = round(fit.low * scale), min(len(values) - 1, round((fit.high + 1) * scale))
    return Change(DRIFT, round(fit.at * scale), len(values), fit.level, fit.level + rise, *ends)


def _level_at(steps: Sequence[Change], values: Sequence[float], scale: float, num: int) -> list[float]:
    """Return the levels of a series that changes only at `steps`, at `num` points."""
    found = [steps[0].before if steps else median(values)] * num
    for step in steps:
        first = min(num, round(step.index / scale))
        found[first:] = [step.after] * (num - first)
    return found


def hinge(points: Sequence[float], k: int) -> tuple[float, int, float, float]:
    """Return the sum of residuals of a level that becomes a slope at `k`; then `k`, the level and the slope.

    Both minimize absolute residuals: the level of those before, the slope of those after it.
    """
    num = len(points)
    if k < 4:  # too few before it: the level follows from the slope
        slopes = sorted((points[j] - points[i]) / (j - i) for i in range(num) for j in range(i + num // 4, num))
        slope = quantile(slopes, 0.5)
        level = median(y - slope * max(0, i - k) for i, y in enumerate(points))
    else:
        level = median(points[: k + 1])
        weighted = sorted(((points[i] - level) / (i - k), i - k) for i in range(k + 1, num))
        reached = list(accumulate(weight for _, weight in weighted))
        slope = weighted[bisect_left(reached, reached[-1] / 2)][0]
    cost = sum(abs(y - level - slope * max(0, i - k)) for i, y in enumerate(points))
    return cost, k, level, slope


def tau(values: Sequence[float]) -> float:
    """Return Kendall's tau of a series with time: 1 if it only rises, -1 if it only falls."""
    num = len(values)
    if num < 2:
        return 0.0
    signs = sum((values[j] > values[i]) - (values[j] < values[i]) for i in range(num) for j in range(i + 1, num))
    return signs / (num * (num - 1) / 2)
