"""Segmented regression: from which value on a series grows, how sure that is, and whether levels explain it as well.

Residuals are taken for Laplace-distributed, so fits minimize their absolute sum and outliers count little. Neighbors
are alike on a busy machine: what their residuals have in common makes values count for less than one each.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from statistics import median

_ROUNDS = 12  # of reweighting; the residuals then change by less than 1 %
HALF_CHI_SQUARE = 1.92  # of the logarithm of the likelihood: the interval of 95 %
DECISIVE = 10.0  # advantage by the Bayesian information criterion (Kass and Raftery 1995: very strong)


@dataclass(frozen=True)
class Hinge:
    """A level that becomes a slope."""

    cost: float  # the sum of absolute residuals
    at: int  # the last value of the level
    level: float
    slope: float  # per value
    low: int = 0  # it begins between these values, with 95 %
    high: int = 0

    def value(self, i: int) -> float:
        return self.level + self.slope * max(0, i - self.at)


def growth(points: Sequence[float], last: int) -> tuple[Hinge, float]:
    """Return the best hinge that begins at `last` or before, and how many values count as independent."""
    fits = [_hinge(points, at) for at in range(last + 1)]
    best = min(fits, key=lambda fit: fit.cost)
    num = num_independent([y - best.value(i) for i, y in enumerate(points)])
    floor = 1e-9 * sum(map(abs, points)) or 1e-300
    near = [fit.at for fit in fits if num * math.log((fit.cost + floor) / (best.cost + floor)) <= HALF_CHI_SQUARE]
    if near[0] == 0:  # the simplest that explains it as well: from the beginning on
        best = fits[0]
    return Hinge(best.cost, best.at, best.level, best.slope, near[0], near[-1]), num


def advantage(fit: tuple[float, int], rival: tuple[float, int], num: float, floor: float) -> float:
    """Return by how much the Bayesian information criterion prefers a fit to its rival: cost and fitted figures."""
    (cost, num_fitted), (other, num_other) = fit, rival
    return 2 * num * math.log((other + floor) / (cost + floor)) - (num_fitted - num_other) * math.log(max(2.0, num))


def levels(points: Sequence[float], shortest: int) -> Iterator[tuple[float, int]]:
    """Yield the costs of a constant, of one change of level and of two, and how many figures each fits."""
    yield _cost(points), 1
    parts = [points]
    for num_fitted in (3, 5):
        splits = []
        for n, part in enumerate(parts):
            of_part = [(_cost(part[:k]) + _cost(part[k:]) - _cost(part), k)
                       for k in range(shortest, len(part) - shortest + 1)]  # fmt: skip
            splits += [(*min(of_part), n)] if of_part else []
        if not splits:
            return
        _, k, n = min(splits)
        parts[n : n + 1] = [parts[n][:k], parts[n][k:]]
        yield sum(map(_cost, parts)), num_fitted


def num_independent(residuals: Sequence[float]) -> float:
    """Return as how many independent values they count, by how often neighbors have the same sign.

    >>> num_independent([1.0, -1.0] * 8), round(num_independent([1.0] * 50 + [-1.0] * 50))
    (16.0, 1)
    """
    signs = [(each > 0) - (each < 0) for each in residuals]
    alike = sum(a * b for a, b in pairwise(signs)) / max(1, len(signs) - 1)
    correlation = max(0.0, math.sin(math.pi / 2 * alike))  # if the values are normal
    return max(1.0, len(signs) * (1 - correlation) / (1 + correlation))


def _cost(values: Sequence[float]) -> float:
    middle = median(values)
    return sum(abs(value - middle) for value in values)


def _hinge(points: Sequence[float], at: int) -> Hinge:
    """Return the level and the slope with the least sum of absolute residuals, by weighted least squares."""
    flat, rising = points[: at + 1], points[at + 1 :]
    xs = range(1, len(rising) + 1)
    least = 1e-9 * max(1e-300, sum(map(abs, points)) / len(points))
    of_flat, of_rising = [1.0] * len(flat), [1.0] * len(rising)
    level = slope = 0.0
    for _ in range(_ROUNDS):
        weighted = list(map(mul, of_rising, xs))
        w, wy = sum(of_flat) + sum(of_rising), sum(map(mul, of_flat, flat)) + sum(map(mul, of_rising, rising))
        wx, wxx, wxy = sum(weighted), sum(map(mul, weighted, xs)), sum(map(mul, weighted, rising))
        determinant = w * wxx - wx * wx
        if determinant <= 0:
            break
        slope = (w * wxy - wx * wy) / determinant
        level = (wy - slope * wx) / w
        # Not by max(), which is slow: this is most of the time that judging a whole run takes.
        of_flat = [1 / (off if (off := abs(y - level)) > least else least) for y in flat]
        of_rising = [1 / (off if (off := abs(y - level - slope * x)) > least else least) for x, y in zip(xs, rising)]
    cost = sum(abs(y - level) for y in flat) + sum(abs(y - level - slope * x) for x, y in zip(xs, rising))
    return Hinge(cost, at, level, slope)
