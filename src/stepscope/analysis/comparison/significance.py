"""Whether two sets of samples differ: ratio of medians, its interval, a rank test; for runs a t-test.

Uses only the standard library, so recordings can be compared without torch and Polars.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from stepscope.analysis.time.statistics import quantile

SIGNIFICANCE = 0.05
MIN_SAMPLES = 6
"""On each side. With 3 and 3, a two-sided rank test cannot get below p = 0.1; with fewer than 6 samples, a median has
no 95 % interval, since all lie on one side of it with probability 2 ÷ 2ⁿ."""
MIN_RUNS = 3  # on each side. With two runs, it is unknown which one is the outlier.
NUM_RESAMPLES = 2000
_MAX_EXACT = 20  # up to this many samples on each side, the rank test is exact (without ties)
_POWER = 0.8
# Standard normal quantiles of 0.975 and 0.8: differences of so many standard errors are found with 80 % probability.
_DETECTABLE = 1.960 + 0.842


@dataclass(frozen=True)
class Difference:
    """The second median compared with the first."""

    ratio: float  # the second median ÷ the first
    low: float  # lower end of the 95 % bootstrap interval of the ratio
    high: float
    p_value: float
    """Two-sided: Mann–Whitney test for steps; for runs, Student's t-test and, from 4 and 4 on, Mann–Whitney too; for
    pairs of runs, the t-test of their ratios."""
    detectable_share: float  # the smallest change that such samples show with 80 % probability

    @property
    def is_significant(self) -> bool:
        """Whether both the rank test and the interval show a difference."""
        return self.p_value < SIGNIFICANCE and not self.low <= 1 <= self.high


def difference(base: Sequence[float], new: Sequence[float]) -> Difference:
    """Return the change of the median from `base` to `new` (positive samples), deterministically.

    >>> found = difference([10, 11, 12, 13, 14, 15], [20, 22, 24, 26, 28, 30])
    >>> found.ratio, found.is_significant
    (2.0, True)
    """
    first, second = sorted(base), sorted(new)
    medians = zip(_medians(first, side=0), _medians(second, side=1), strict=True)
    ratios = sorted(after / before for before, after in medians)
    logarithms = [math.log(ratio) for ratio in ratios]
    mean = sum(logarithms) / len(logarithms)
    error = math.sqrt(sum((value - mean) ** 2 for value in logarithms) / (len(logarithms) - 1))
    return Difference(
        ratio=quantile(second, 0.5) / quantile(first, 0.5),
        low=quantile(ratios, 0.025),
        high=quantile(ratios, 0.975),
        p_value=mann_whitney(first, second),
        detectable_share=math.expm1(_DETECTABLE * error),
    )


def with_waits(found: Difference, base_share: float, new_share: float) -> Difference:
    """Return a difference whose interval includes what shares of the times may be due to other processes.

    >>> found = Difference(0.5, 0.45, 0.55, p_value=0.001, detectable_share=0.1)
    >>> wider = with_waits(found, base_share=0.5, new_share=0.2)
    >>> round(wider.low, 2), round(wider.high, 2), wider.is_significant
    (0.36, 1.1, False)
    """
    return replace(found, low=found.low * (1 - new_share), high=found.high / (1 - base_share))


def difference_of_runs(base: Sequence[float], new: Sequence[float]) -> Difference:
    """Return the change from `base` to `new`, one positive figure per run: Student's t-test of logarithms, and ranks.

    Steps of one run do not show how much runs vary, so a run is one sample. Runs are too few for resampling and are
    assumed to be normal with equal variance. That fails for a machine with two speeds: with enough runs for the rank
    test (4 and 4), the larger p-value counts.

    >>> found = difference_of_runs([10.0, 10.1, 9.9], [11.0, 11.1, 10.9])
    >>> round(found.ratio, 2), found.is_significant
    (1.1, True)
    """
    sides = [[math.log(value) for value in side] for side in (base, new)]
    means = [sum(side) / len(side) for side in sides]
    squares = sum((value - mean) ** 2 for side, mean in zip(sides, means) for value in side)
    freedom = len(base) + len(new) - 2
    error = math.sqrt(squares / freedom * (1 / len(base) + 1 / len(new)))
    found = _by_student(means[1] - means[0], error, freedom)
    if 2 / math.comb(freedom + 2, len(base)) < SIGNIFICANCE:
        found = replace(found, p_value=max(found.p_value, mann_whitney(base, new)))
    return found


def difference_of_pairs(base: Sequence[float], new: Sequence[float]) -> Difference:
    """Return the change from `base` to `new`, one positive figure per run, where runs were made in turns.

    What a machine does for a while changes both runs of a pair alike: their ratios are tested, not the sides.

    >>> drifting = difference_of_pairs([10.0, 13.0, 17.0, 11.0], [9.0, 11.8, 15.2, 9.9])
    >>> round(drifting.ratio, 2), drifting.is_significant
    (0.9, True)
    """
    ratios = [math.log(after / before) for before, after in zip(base, new, strict=True)]
    mean, freedom = sum(ratios) / len(ratios), len(ratios) - 1
    error = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / freedom / len(ratios))
    return _by_student(mean, error, freedom)


def _by_student(change: float, error: float, freedom: int) -> Difference:
    """Return the difference whose logarithm has this standard error."""
    p_value = student(change / error, freedom) if error else float(change == 0)
    margin = _student_quantile(SIGNIFICANCE, freedom) * error
    detectable = (_student_quantile(SIGNIFICANCE, freedom) + _student_quantile(2 * (1 - _POWER), freedom)) * error
    return Difference(
        ratio=math.exp(change),
        low=math.exp(change - margin),
        high=math.exp(change + margin),
        p_value=p_value,
        detectable_share=math.expm1(detectable),
    )


def student(t: float, freedom: int) -> float:
    """Return the two-sided p-value of Student's t; Abramowitz and Stegun, 26.7.3 and 26.7.4.

    >>> round(student(2.776, 4), 3)
    0.05
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    is_odd = freedom % 2
    term, total = (math.cos(angle) if is_odd else 1.0), 0.0
    for k in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= square * (k - 1) / k
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if is_odd else inside))


@lru_cache(maxsize=64)
def _student_quantile(p_value: float, freedom: int) -> float:
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) > p_value else (low, middle)
    return high


def mann_whitney(base: Sequence[float], new: Sequence[float]) -> float:
    """Return the two-sided p-value of the Mann–Whitney test: exact for few samples without ties, else by the normal
    approximation with corrections for ties and continuity.

    >>> mann_whitney([1, 2, 3], [4, 5, 6])
    0.1
    """
    first, second = sorted(base), sorted(new)
    ordered = sorted([*first, *second])
    num_first, num_second, num = len(first), len(second), len(ordered)
    if not num_first or not num_second:
        raise ValueError("a rank test needs samples on both sides")
    # How often a sample of the first side exceeds one of the second; a tie counts half.
    above = sum(bisect_left(second, value) + bisect_right(second, value) for value in first) / 2
    ties = [bisect_right(ordered, value) - bisect_left(ordered, value) for value in set(ordered)]
    if max(ties) == 1 and max(num_first, num_second) <= _MAX_EXACT:
        counts = _counts(num_first, num_second)
        tail = sum(counts[: int(min(above, num_first * num_second - above)) + 1])
        return min(1.0, 2 * tail / math.comb(num, num_first))
    variance = num_first * num_second / 12 * (num + 1 - sum(t**3 - t for t in ties) / (num * (num - 1)))
    if variance <= 0:
        return 1.0  # all samples are equal
    distance = max(0.0, abs(above - num_first * num_second / 2) - 0.5)
    return math.erfc(distance / math.sqrt(2 * variance))


@lru_cache(maxsize=8)
def _counts(num_first: int, num_second: int) -> tuple[int, ...]:
    """Return for each number of pairs how many orders of all samples have the first side above in that many.

    The coefficients of the Gaussian binomial: ∏ (1 − x^(n₂+i)) ÷ (1 − x^i), i = 1 … n₁.
    """
    size = num_first * num_second + 1
    counts = [1] + [0] * (size - 1)
    for i in range(1, num_first + 1):
        for place in range(size - 1, num_second + i - 1, -1):
            counts[place] -= counts[place - num_second - i]
        for place in range(i, size):
            counts[place] += counts[place - i]
    return tuple(counts)


def _medians(ordered: Sequence[float], side: int) -> list[float]:
    return [(ordered[low] + ordered[high]) / 2 for low, high in _middle_places(len(ordered), side)]


@lru_cache(maxsize=64)
def _middle_places(num: int, side: int) -> tuple[tuple[int, int], ...]:
    """Return which two of `num` ordered samples are in the middle of each resample (equal if `num` is odd).

    A resample takes positions ⌊num·u⌋ for uniform u, so its middle positions come from the middle of `num` ordered
    uniform numbers, which are Beta distributed: no sorting is needed.
    """
    generator = random.Random(2 * num + side)  # a separate generator: the caller's random state stays untouched
    rank = (num + 1) // 2
    places = []
    for _ in range(NUM_RESAMPLES):
        lower = generator.betavariate(rank, num - rank + 1)
        upper = lower if num % 2 else lower + (1 - lower) * generator.betavariate(1, num - rank)
        places.append((min(num - 1, int(num * lower)), min(num - 1, int(num * upper))))
    return tuple(places)
