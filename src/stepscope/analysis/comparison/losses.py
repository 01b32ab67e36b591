"""Whether the losses of runs with a change agree with those of runs without it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from statistics import fmean, stdev

from stepscope.analysis.time.statistics import block_means

SAME, REORDERED, REDUCED, RESAMPLED, BY_HAND = "same", "reordered", "reduced", "resampled", "by hand"
NOT_COMPARABLE = "not comparable"
TOLERANCE: Mapping[str, float] = {SAME: 1e-6, REORDERED: 1e-3, REDUCED: 2e-2, RESAMPLED: 2e-2,
                                  BY_HAND: 2e-2}  # fmt: skip
"""Allowed difference of losses by effect on the arithmetic: none, reordered sums, or lower precision. Rounding to
bfloat16's 8 bits is up to 0.4 %, and a step has many roundings. If the data may draw other random numbers, or the
change was made by hand, the mean of the losses may differ by that, beyond chance."""
AGREE, DIFFER, NOT_COMPARED = "agree", "differ", "not compared"
NOISE_FACTOR = 2.0  # beyond the tolerance, this many times the distance of two runs without the change
_LEAST_SCALE = 0.1
"""Of the largest loss; smaller losses are compared with this instead, since relative differences near zero explode.
"""
_NO_LOSS = "no loss was found: call backward() on a single number, or stepscope.step(loss=…)"

Losses = Mapping[int, float]


@dataclass(frozen=True)
class LossCheck:
    """How the losses with a change compare with those without it."""

    verdict: str  # `agree`, `differ` or `not compared`
    reason: str | None  # why they were not compared
    arithmetic: str
    """The change's effect: `same`, `reordered`, `reduced`; `resampled`: the data may draw other random numbers, and
    if it does, mean losses are compared; `by hand`: the same rule; `not comparable`."""
    tolerance_share: float | None = None  # the allowed difference at each step
    noise_share: float | None = None
    """The largest difference between two runs without the change; 0 for a deterministic script."""
    rounding_share: float | None = None
    """How far rounding alone had moved the losses by `step`, if that was measured."""
    limit_share: float | None = None  # the limit applied: the tolerance, plus twice the noise and the rounding
    difference_share: float | None = None
    """The largest difference between a run with and one without the change: median over pairs; null if not finite."""
    step: int | None = None  # the step of that difference, in the median pair
    before: float | None = None  # the loss there without the change; null if not finite
    after: float | None = None
    num_steps: int = 0  # the fewest steps compared in any pair
    chance_share: float | None = None  # how far chance may move the mean loss, if the data drew other random numbers


def check_losses(
    before: Sequence[Losses],
    after: Sequence[Losses],
    arithmetic: str,
    tolerance_share: float | None = None,
    is_low: bool = False,
    rounded: Sequence[Losses] = (),
) -> LossCheck:
    """Return the comparison of losses (step → loss) of runs with a change and without; `is_low`: in low precision.

    `rounded` are runs without the change whose weights were disturbed by the rounding of its precision. Where
    training amplifies that, twice as much is allowed from that step on; earlier steps are held to the tolerance.

    >>> check_losses([{0: 2.0}, {0: 2.0}], [{0: 2.1}], "reordered").verdict
    'differ'
    """
    if arithmetic == NOT_COMPARABLE:
        return LossCheck(NOT_COMPARED, "the change affects the training data", arithmetic)
    if not all(before) or not all(after) or not before or not after:
        return LossCheck(NOT_COMPARED, _NO_LOSS, arithmetic)
    # In low precision, reordered sums differ as much as lower precision does.
    known = TOLERANCE[REDUCED if is_low and arithmetic == REORDERED else arithmetic]
    tolerance = known if tolerance_share is None else tolerance_share
    moved = _moved(before, rounded)
    num_steps = min(len(set(first) & set(second)) for first, second in product(before, after))
    if not num_steps:
        return LossCheck(
            NOT_COMPARED, "runs with and without the change have no step in common", arithmetic, tolerance
        )
    noise = noise_of(before)
    if not math.isfinite(noise) or not any(map(math.isfinite, before[0].values())):
        return LossCheck(NOT_COMPARED, "the loss is not finite without the change either", arithmetic, tolerance)
    share, step, first, second = _median_distance(before, after, moved)
    limit = tolerance + NOISE_FACTOR * noise
    # Nobody knows that a change by hand draws other random numbers, so too few steps for means are no excuse.
    has_means = arithmetic == RESAMPLED or (arithmetic == BY_HAND and num_steps >= _FEWEST)
    if has_means and share > limit and all(math.isfinite(loss) for run in (*before, *after) for loss in run.values()):
        return _means(before, after, arithmetic, tolerance, noise)
    agrees = share <= limit + _allowed(moved, step)
    if agrees and moved:  # then the largest difference is worth reporting, however much of it is explained
        share, step, first, second = _median_distance(before, after, {})
    return LossCheck(
        verdict=AGREE if agrees else DIFFER,
        reason=None,
        arithmetic=arithmetic,
        tolerance_share=tolerance,
        noise_share=noise,
        rounding_share=moved.get(step),
        limit_share=limit + _allowed(moved, step),
        difference_share=finite(share),
        step=step,
        before=finite(first),
        after=finite(second),
        num_steps=num_steps,
    )


_FEWEST = 16  # steps
_NUM_BLOCKS = 5  # neighboring losses depend on one another, blocks of them hardly
_STUDENT = 4.6  # of so many blocks: chance exceeds it once in 100 times


def _means(
    before: Sequence[Losses], after: Sequence[Losses], arithmetic: str, tolerance: float, noise: float
) -> LossCheck:
    """Return whether the mean losses agree, of runs whose batches differ."""
    pairs = sorted((_mean_difference(*pair) for pair in product(before, after)), key=lambda pair: abs(pair[0]))
    share, chance, first, second, num_steps = pairs[(len(pairs) - 1) // 2]
    if num_steps < _FEWEST:
        reason = f"the losses of single steps differ, and {num_steps} steps are too few to compare means"
        return LossCheck(NOT_COMPARED, reason, arithmetic, tolerance, noise)
    return LossCheck(
        verdict=AGREE if abs(share) <= tolerance + chance else DIFFER,
        reason=None,
        arithmetic=arithmetic,
        tolerance_share=tolerance,
        noise_share=noise,
        limit_share=tolerance + chance,
        difference_share=finite(abs(share)),
        before=finite(first),
        after=finite(second),
        num_steps=num_steps,
        chance_share=finite(chance),
    )


def _mean_difference(first: Losses, second: Losses) -> tuple[float, float, float, float, int]:
    """Return how far two runs' mean losses are apart and how far chance may move them, as shares of the first's; both
    means; and the number of steps."""
    steps = sorted(set(first) & set(second))
    means = [fmean(run[step] for step in steps) for run in (first, second)]
    if len(steps) < _FEWEST:
        return math.inf, 0.0, means[0], means[1], len(steps)
    size = len(steps) // _NUM_BLOCKS
    blocks = block_means([second[step] - first[step] for step in steps[: _NUM_BLOCKS * size]], size)
    scale = max(abs(means[0]), _LEAST_SCALE * max(abs(first[step]) for step in steps)) or 1.0
    chance = _STUDENT * stdev(blocks) / math.sqrt(_NUM_BLOCKS)
    return (means[1] - means[0]) / scale, chance / scale, means[0], means[1], len(steps)


_Worst = tuple[float, int, float, float]  # the difference as a share, its step, and both losses


def _median_distance(before: Sequence[Losses], after: Sequence[Losses], moved: Mapping[int, float]) -> _Worst:
    pairs = [_distance(first, second, moved) for first, second in product(before, after)]
    return sorted(pairs, key=lambda pair: pair[0] - _allowed(moved, pair[1]))[(len(pairs) - 1) // 2]


def noise_of(runs: Sequence[Losses]) -> float:
    return max((_distance(first, second, {})[0] for first, second in combinations(runs, 2)), default=0.0)


def _moved(before: Sequence[Losses], rounded: Sequence[Losses]) -> dict[int, float]:
    """Return by step how far rounding has moved the losses by then."""
    moved: dict[int, float] = {}
    for first, second in product(before, rounded):
        most = 0.0
        for step, share, _, _ in _differences(first, second):
            most = max(most, share if math.isfinite(share) else 0.0)
            moved[step] = max(most, moved.get(step, 0.0))
    return moved


def _allowed(moved: Mapping[int, float], step: int) -> float:
    return NOISE_FACTOR * moved.get(step, 0.0)


def _distance(first: Losses, second: Losses, moved: Mapping[int, float]) -> _Worst:
    """Return the difference that exceeds what rounding explains by most: its share, its step and both losses."""
    worst = (-1.0, -1, 0.0, 0.0)
    for step, share, one, other in _differences(first, second):
        if worst[1] < 0 or share - _allowed(moved, step) > worst[0] - _allowed(moved, worst[1]):
            worst = (share, step, one, other)
    return worst


def _differences(first: Losses, second: Losses) -> Iterator[tuple[int, float, float, float]]:
    """Yield each common step with the difference as a share of the first's loss, and both losses."""
    largest = max((abs(loss) for loss in first.values() if math.isfinite(loss)), default=0.0)
    for step in sorted(set(first) & set(second)):
        one, other = first[step], second[step]
        if math.isfinite(one) and math.isfinite(other):
            scale = max(abs(one), _LEAST_SCALE * largest)
            share = abs(other - one) / scale if scale else float(other != one)
        else:
            share = 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
        yield step, share, one, other


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
