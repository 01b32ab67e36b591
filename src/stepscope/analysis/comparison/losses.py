"""Whether a change preserves the losses, step by step. Uses only the standard library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

SAME, REORDERED, REDUCED, NOT_COMPARABLE = "same", "reordered", "reduced", "not comparable"
TOLERANCE: Mapping[str, float] = {SAME: 1e-6, REORDERED: 1e-3, REDUCED: 2e-2}
"""Allowed difference of losses by effect on the arithmetic: none, reordered sums, or lower precision. Rounding to
bfloat16's 8 bits is up to 0.4 %, and a step has many roundings."""
AGREE, DIFFER, NOT_COMPARED = "agree", "differ", "not compared"
NOISE_FACTOR = 2.0  # beyond the tolerance, this many times the distance of two runs without the change
_LEAST_SCALE = 0.1
"""Of the largest loss; smaller losses are compared with this instead, since relative differences near zero explode.
"""
_NO_LOSS = "no loss was found: call backward() on a single number, or stepscope.step(loss=…)"
LOW_DTYPES = ("tf32", "bf16", "fp16", "fp8")

Losses = Mapping[int, float]


@dataclass(frozen=True)
class LossCheck:
    """How the losses with a change compare with those without it."""

    verdict: str  # `agree`, `differ` or `not compared`
    reason: str | None  # why they were not compared
    arithmetic: str  # the change's effect on the arithmetic: `same`, `reordered`, `reduced`, `not comparable`
    tolerance_share: float | None = None  # the allowed difference at each step
    noise_share: float | None = None
    """The largest difference between two runs without the change; 0 for a deterministic script."""
    limit_share: float | None = None  # the limit that was applied: the tolerance plus twice the noise
    difference_share: float | None = None
    """The largest difference between a run with and one without the change: median over pairs; null if not finite."""
    step: int | None = None  # the step of that difference, in the median pair
    before: float | None = None  # the loss there without the change; null if not finite
    after: float | None = None
    num_steps: int = 0  # the fewest steps compared in any pair


def check_losses(
    before: Sequence[Losses],
    after: Sequence[Losses],
    arithmetic: str,
    tolerance_share: float | None = None,
    is_low: bool = False,
) -> LossCheck:
    """Return the comparison of losses (step → loss) of runs with a change and without; `is_low`: in low precision.

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
    pairs = [_distance(first, second) for first, second in product(before, after)]
    num_steps = min(len(set(first) & set(second)) for first, second in product(before, after))
    if not num_steps:
        return LossCheck(
            NOT_COMPARED, "runs with and without the change have no step in common", arithmetic, tolerance
        )
    noise = max((_distance(first, second)[0] for first, second in combinations(before, 2)), default=0.0)
    if not math.isfinite(noise) or not any(map(math.isfinite, before[0].values())):
        return LossCheck(NOT_COMPARED, "the loss is not finite without the change either", arithmetic, tolerance)
    limit = tolerance + NOISE_FACTOR * noise
    share, step, first, second = sorted(pairs, key=lambda pair: pair[0])[(len(pairs) - 1) // 2]
    return LossCheck(
        verdict=AGREE if share <= limit else DIFFER,
        reason=None,
        arithmetic=arithmetic,
        tolerance_share=tolerance,
        noise_share=noise,
        limit_share=limit,
        difference_share=_finite(share),
        step=step,
        before=_finite(first),
        after=_finite(second),
        num_steps=num_steps,
    )


def _distance(first: Losses, second: Losses) -> tuple[float, int, float, float]:
    """Return the largest difference at a common step as a share of the first's loss, that step, and both losses."""
    largest = max((abs(loss) for loss in first.values() if math.isfinite(loss)), default=0.0)
    worst = (-1.0, -1, 0.0, 0.0)
    for step in sorted(set(first) & set(second)):
        one, other = first[step], second[step]
        if math.isfinite(one) and math.isfinite(other):
            scale = max(abs(one), _LEAST_SCALE * largest)
            share = abs(other - one) / scale if scale else float(other != one)
        else:
            share = 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
        if share > worst[0]:
            worst = (share, step, one, other)
    return worst


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
