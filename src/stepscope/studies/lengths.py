"""How bytes grow with the length: what is there whatever the length, what each token takes, what each pair of them.

A power through all lengths would mislead: 32 KiB a position and 3 B a pair are one of 1.3 up to 16384 tokens, where
the pairs are more than half of it. Bytes are exact enough to be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from operator import mul
from typing import NamedTuple

from stepscope.errors import Unavailable
from stepscope.studies.figures import Record, said

EXACT_SHARE = 0.01
"""Figures this near to each other are the same; where some fit is ten times as near, they are not."""


class Grown(NamedTuple):
    """Bytes = constant + token · tokens of the batch + pair · length². Of two lengths only `token` is known."""

    constant_bytes: float | None
    token_bytes: float
    pair_bytes: float | None
    pairs_share: float | None
    """Of the sum at the longest length."""
    error_share: float | None
    """How far it is from a measured figure at the most."""


def grown(rows: Iterable[Record], name: str) -> Grown:
    """What a figure of rows of one batch size is made of, by the length.

    Least squares of relative errors, nothing negative, a length more than terms, so that a fit can fail. Pairs are
    believed in where without them it is more than 1 % off and more than 4 times as far as with them: an allocator's
    steps are no square. Of what is left the fewest terms within 1 % (0.1 % where one is), or twice the best's error.

    >>> rows = [{"seq_len": n, "num_tokens": 4 * n, "bytes": 800 * n + 3 * n * n} for n in (64, 128, 256)]
    >>> found = grown(rows, "bytes")
    >>> found.constant_bytes, round(found.token_bytes), round(found.pair_bytes), round(found.pairs_share, 2)
    (0.0, 200, 3, 0.49)
    """
    by_length = {row["seq_len"]: row for row in rows if row.get(name)}
    points = [(length, by_length[length]["num_tokens"], by_length[length][name]) for length in sorted(by_length)]
    if len(points) < 2:
        raise Unavailable(f"{name} is there for fewer than two lengths")
    (_, fewest_tokens, least), (longest, most_tokens, most) = points[0], points[-1]
    if len(points) == 2:
        return Grown(None, (most - least) / (most_tokens - fewest_tokens), None, None, None)
    fits = list(_fits(points))
    without_pairs = [fit for fit in fits if 2 not in fit[0]]
    if _least_error(without_pairs) <= max(EXACT_SHARE, 4 * _least_error(fits)):
        fits = without_pairs
    best = _least_error(fits)
    limit = max(EXACT_SHARE if best > EXACT_SHARE / 10 else EXACT_SHARE / 10, 2 * best)
    found, error = min((fit for fit in fits if fit[1] <= limit), key=lambda fit: (len(fit[0]), fit[1]))
    constant, token, pair = (found.get(at, 0.0) for at in range(3))
    of_pairs = pair * longest**2
    return Grown(constant, token, pair, of_pairs / (constant + token * most_tokens + of_pairs), error)


Fit = tuple[dict[int, float], float]
"""Factors of some of the three terms, by their place, and the largest relative error with them."""


def _least_error(fits: Iterable[Fit]) -> float:
    return min(error for _, error in fits)


def _fits(points: Sequence[tuple[int, int, int]]) -> Iterator[Fit]:
    """Of every choice of terms whose factors are not negative."""
    terms = [(1 / value, tokens / value, length**2 / value) for length, tokens, value in points]
    for number in range(1, min(3, len(points) - 1) + 1):
        for chosen in combinations(range(3), number):
            columns = [[at_length[place] for at_length in terms] for place in chosen]
            factors = _nearest_to_ones(columns)
            if min(factors) >= 0:
                sums = (sum(map(mul, factors, at_length)) for at_length in zip(*columns))
                yield dict(zip(chosen, factors)), max(abs(each - 1) for each in sums)


def _nearest_to_ones(columns: Sequence[Sequence[float]]) -> list[float]:
    """The factors with which columns add up to ones as nearly as can be: normal equations, by Gauss and Jordan."""
    scales = [max(column) for column in columns]
    scaled = [[value / scale for value in column] for column, scale in zip(columns, scales)]
    rows = [[*(sum(map(mul, one, other)) for other in scaled), sum(one)] for one in scaled]
    for at, row in enumerate(rows):
        row[:] = [value / row[at] for value in row]
        for other in rows:
            if other is not row:
                other[:] = [value - other[at] * subtracted for value, subtracted in zip(other, row)]
    return [row[-1] / scale for row, scale in zip(rows, scales)]


def grows(rows: Iterable[Record], name: str) -> str:
    """`grown` in words: what follows "the peak".

    >>> grows([{"seq_len": n, "num_tokens": n, "bytes": 4096 + 8 * n} for n in (64, 128, 256, 512)], "bytes")
    'grows linearly: 8.0 B for each token and 4.00 KiB whatever the length, nothing for pairs'
    """
    records = [row for row in rows if row.get(name)]
    found = grown(records, name)
    shortest, longest = (choose(row["seq_len"] for row in records) for choose in (min, max))
    token = f"{_bytes(found.token_bytes)} for each token"
    if found.error_share is None:
        return f"grows by {token} from {shortest} to {longest} tokens (two lengths cannot tell linear from quadratic)"
    amounts = [f"{_bytes(found.pair_bytes)} for each pair of tokens"] if found.pair_bytes else []
    amounts += [token] if found.token_bytes else []
    amounts += [f"{_bytes(found.constant_bytes)} whatever the length"] if found.constant_bytes else []
    made_of = " and ".join(amounts)
    is_exact = found.error_share <= EXACT_SHARE
    off = "" if is_exact else f" (up to {said('share', found.error_share)} off)"
    if found.pair_bytes:
        share = said("share", found.pairs_share)
        return f"grows quadratically: {made_of}{off}; at {longest} tokens the pairs are {share} of it"
    if found.token_bytes:
        return f"grows linearly: {made_of}{', nothing for pairs' if is_exact else off}"
    return f"does not grow: {made_of}{off}"


def _bytes(value: float) -> str:
    """Of a pair they are few."""
    return f"{value:.1f} B" if value < 100 else said("bytes", value)
