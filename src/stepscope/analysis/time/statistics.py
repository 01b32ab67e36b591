"""Summaries of samples: quantiles, spread, and a bootstrap interval of the median."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

NUM_RESAMPLES = 1000
MOST_RESAMPLED = 2_000  # samples; of more, the interval follows from their order alone


@dataclass(frozen=True)
class Distribution:
    """Summary of samples, in their own unit."""

    num_samples: int
    median: float
    p10: float
    p90: float
    mean: float
    std: float
    ci_low: float  # lower end of the 95 % interval of the median: bootstrap, or by order statistics
    ci_high: float


def describe(samples: Sequence[float]) -> Distribution:
    """Return the distribution of samples; the same samples always give the same interval.

    >>> describe([3.0, 1.0, 2.0]).median
    2.0
    """
    if not samples:
        raise ValueError("no samples to describe")
    ordered = sorted(samples)
    mean = sum(ordered) / len(ordered)
    variance = sum((x - mean) ** 2 for x in ordered) / max(1, len(ordered) - 1)
    ci_low, ci_high = _median_interval(ordered)
    return Distribution(
        num_samples=len(ordered),
        median=quantile(ordered, 0.5),
        p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
        mean=mean,
        std=variance**0.5,
        ci_low=ci_low,
        ci_high=ci_high,
    )


def _median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median."""
    num = len(ordered)
    if num > MOST_RESAMPLED:
        # The rank of the true median is binomial, so its standard deviation is half the root of the count.
        half = 0.98 / num**0.5
        return quantile(ordered, 0.5 - half), quantile(ordered, 0.5 + half)
    weight = (num - 1) / 2 % 1
    medians = sorted(ordered[low] + (ordered[high] - ordered[low]) * weight for low, high in _resampled_middles(num))
    return quantile(medians, 0.025), quantile(medians, 0.975)


@lru_cache(maxsize=256)
def _resampled_middles(num: int) -> tuple[tuple[int, int], ...]:
    """Return which of `num` ordered samples are in the middle of each resample: the same for all of this number."""
    generator = random.Random(num)  # a separate generator: the caller's random state stays untouched
    low = (num - 1) // 2
    high = min(low + 1, num - 1)
    resamples = (sorted(generator.choices(range(num), k=num)) for _ in range(NUM_RESAMPLES))
    return tuple((resample[low], resample[high]) for resample in resamples)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of ordered samples lie, interpolated.

    >>> quantile([0.0, 10.0], 0.9)
    9.0
    """
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def block_means(values: Sequence[float], size: int) -> list[float]:
    """Return the means of whole blocks of neighbors, which depend on one another less than the neighbors do.

    >>> block_means([1.0, 3.0, 5.0, 7.0, 9.0], size=2)
    [2.0, 6.0]
    """
    return [fmean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
