"""Metrics of a run, and how they changed: figures, and the verdict on samples."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepscope.analysis.comparison.significance import (
    MIN_RUNS,
    MIN_SAMPLES,
    difference,
    difference_of_pairs,
    difference_of_runs,
    with_waits,
)
from stepscope.analysis.time.statistics import quantile

THRESHOLD_SHARE = 0.02  # smaller changes are of no practical importance, even if significant (`--threshold`)
NO_DIFFERENCE, TOO_FEW, SAME = "no difference shown", "too few samples", "same"
DISTURBED = "cannot tell"
NONE_SHOWN = (NO_DIFFERENCE, DISTURBED, TOO_FEW)
STEPS, RUNS = "steps", "runs"
# Correlation of neighboring steps that chance exceeds with at most 5 % probability, for 20 or more steps.
_CORRELATED = 1.645
# Where a thread waits, others of the same step wait for it, and caches are shared: the whole effect is larger.
MOST_OTHERS_SHARE = 0.1
FEWEST = {STEPS: MIN_SAMPLES, RUNS: MIN_RUNS}  # samples needed on each side for a verdict


@dataclass(frozen=True)
class Metric:
    """A metric that `--fail-on` can name."""

    name: str
    title: str
    unit: str  # `ns`, `bytes`, `per_s`, `share` or `count`
    is_lower_better: bool
    words: tuple[str, str]  # the verdicts for a decrease and an increase
    is_rate: bool = False  # whether it is the inverse of a time; its samples are times


METRICS = {
    metric.name: metric
    for metric in (
        Metric("step_time", "step time", "ns", True, ("faster", "slower")),
        Metric("tokens_per_second", "tokens/s", "per_s", False, ("slower", "faster"), is_rate=True),
        Metric("samples_per_second", "samples/s", "per_s", False, ("slower", "faster"), is_rate=True),
        Metric("mfu", "MFU", "share", False, ("lower", "higher"), is_rate=True),
        Metric("gpu_busy_time", "GPU busy", "ns", True, ("less", "more")),
        Metric("kernels", "kernels per step", "count", True, ("fewer", "more")),
        Metric("peak_memory", "peak allocated", "bytes", True, ("less", "more")),
        Metric("peak_reserved_memory", "peak reserved", "bytes", True, ("less", "more")),
        Metric("peak_resident_memory", "peak resident, host", "bytes", True, ("less", "more")),
    )
}


@dataclass(frozen=True)
class Measure:
    value: float
    samples: tuple[float, ...] | None = None
    """Times of single steps in order, from which the value follows; None if there is one figure per run and no test.
    """
    of: str = STEPS  # what a sample is: a step, or a whole run by its value (the inverse for a rate)
    is_in_turns: bool = False  # whether runs alternate with those of the other side
    others_share: float = 0.0  # of the times, in which training waited for CPU cores that other processes used too


@dataclass(frozen=True)
class Change:
    """One metric on both sides."""

    metric: str
    unit: str  # `ns`, `bytes`, `per_s`, `share` or `count`
    base: float
    new: float
    delta: float  # `new` − `base`
    share: float | None  # `delta` ÷ `base`; null if that is 0
    low: float | None  # lower end of the 95 % bootstrap interval of `share`; null without samples or with too few
    high: float | None
    p_value: float | None
    """Two-sided: Mann–Whitney test for steps; for runs, Student's t-test and, from 4 and 4 on, Mann–Whitney too; for
    runs in turns, the t-test of their ratios."""
    num_samples: tuple[int, int] | None  # on each side; null if there is one figure per run
    samples_are: str | None  # `steps`; `runs` if a side has several; null if there are none
    detectable_share: float | None  # the smallest change that would be detected with 80 % probability
    others_shares: tuple[float, float] | None
    """Shares of the times in which training waited for CPU cores that other processes used too, as the interval
    includes them; null if neither side did, and for runs. From 10 % on, two single runs cannot be told apart."""
    is_significant: bool | None  # whether p < 0.05 and the interval excludes 0
    is_worse: bool  # whether it got worse, by any amount
    verdict: str
    """`faster` or `slower` (for others `less`, `more`, `fewer`, `higher`, `lower`) if the change is significant and
    beyond the threshold; otherwise `no difference shown`, `too few samples`, `cannot tell` if other processes took
    too much, or, for single figures, `same`."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took so much that two single runs cannot be compared."""
        return is_much(self.others_shares)


def is_much(others_shares: tuple[float, float] | None) -> bool:
    return others_shares is not None and max(others_shares) >= MOST_OTHERS_SHARE


def change_of(metric: Metric, base: Measure, new: Measure, threshold_share: float) -> Change:
    share = new.value / base.value - 1 if base.value else None
    is_large = new.value != base.value and (share is None or abs(share) > threshold_share)
    fell, rose = metric.words
    verdict = (rose if new.value > base.value else fell) if is_large else SAME
    found = num_samples = others_shares = None
    ends: tuple[float | None, float | None] = (None, None)
    if base.samples is not None and new.samples is not None:
        num_samples = len(base.samples), len(new.samples)
        if min(num_samples) < FEWEST[base.of]:
            verdict = TOO_FEW
        else:
            is_of_runs = base.of == RUNS
            sides = [side.samples or () if is_of_runs else _costs(metric, side) for side in (base, new)]
            of_runs = difference_of_pairs if base.is_in_turns else difference_of_runs
            found = (of_runs if is_of_runs else difference)(*sides)
            if not is_of_runs and max(base.others_share, new.others_share) > 0:
                others_shares = base.others_share, new.others_share
                found = with_waits(found, *others_shares)
            ends = (1 / found.high - 1, 1 / found.low - 1) if metric.is_rate else (found.low - 1, found.high - 1)
            if is_much(others_shares):
                verdict = DISTURBED
            elif not (found.is_significant and is_large):
                verdict = NO_DIFFERENCE
    return Change(
        metric=metric.name,
        unit=metric.unit,
        base=base.value,
        new=new.value,
        delta=new.value - base.value,
        share=share,
        low=ends[0],
        high=ends[1],
        p_value=None if found is None else found.p_value,
        num_samples=num_samples,
        samples_are=None if num_samples is None else base.of,
        detectable_share=None if found is None else max(threshold_share, found.detectable_share),
        others_shares=others_shares,
        is_significant=None if found is None else found.is_significant,
        is_worse=(new.value > base.value) == metric.is_lower_better and new.value != base.value,
        verdict=verdict,
    )


def _costs(metric: Metric, measure: Measure) -> list[float]:
    """Return samples whose median is the value (its inverse for a rate): tokens per step and FLOPs may differ."""
    samples = measure.samples or ()
    scale = (1 / measure.value if metric.is_rate else measure.value) / quantile(sorted(samples), 0.5)
    return [sample * scale for sample in samples]


def neighbors_correlation(samples: Sequence[float]) -> float:
    """Return the correlation of each sample's rank with the next one's; 0 if all are equal.

    >>> neighbors_correlation([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) > 0.4
    True
    """
    ordered = sorted(samples)
    middle = (len(samples) - 1) / 2
    ranks = [(bisect_left(ordered, sample) + bisect_right(ordered, sample) - 1) / 2 - middle for sample in samples]
    spread = sum(rank * rank for rank in ranks)
    return sum(one * other for one, other in pairwise(ranks)) / spread if spread else 0.0


def correlation_warning(measure: Measure | None) -> list[str]:
    """Return a warning if neighboring steps are correlated: the machine was not idle."""
    samples = (measure.samples if measure and measure.of == STEPS else None) or ()
    if len(samples) < MIN_SAMPLES:
        return []
    correlation = neighbors_correlation(samples)
    if correlation <= _CORRELATED / math.sqrt(len(samples)):
        return []
    return [
        f"neighboring steps are correlated ({correlation:.2f}): the machine was busy, or the work drifts, so "
        "the interval is too narrow. Record both several times, alternating, and pass all: --base … --new …"
    ]
