"""Splits bytes by how they grow with the length: a fixed part, a part per token, a part per pair of tokens.

One power through all lengths would mislead: 32 KiB per position and 3 B per pair look like a power of 1.3 up to 16384
tokens, where the pairs are more than half of the bytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from operator import mul
from typing import Any, NamedTuple

from stepscope.errors import Unavailable
from stepscope.studies.figures import said
from stepscope.studies.stored import Rows
from stepscope.studies.study import Record

FORMULA = "constant + token · tokens of the batch + pair · length²; two lengths give the token term only"
EXACT_SHARE = 0.01  # figures within this share count as equal, unless some fit is ten times closer


class Grown(NamedTuple):
    """Bytes = constant + token · tokens of the batch + pair · length². From two lengths only `token` is known."""

    constant_bytes: float | None
    token_bytes: float
    pair_bytes: float | None
    pairs_share: float | None  # share of the pairs at the longest length
    error_share: float | None  # largest relative error


def grown(rows: Iterable[Record], name: str) -> Grown:
    """Return what a figure of rows of one batch size consists of.

    A least-squares fit of relative errors without negative terms and with one length more than terms, so that it can
    fail. Pairs count only if a fit without them is more than 1 % off and over 4 times as far off: the allocator's
    rounding is not quadratic. Of the rest, the fewest terms within 1 % (0.1 % if possible), or twice the best error.

    >>> rows = [{"seq_len": n, "num_tokens": 4 * n, "bytes": 800 * n + 3 * n * n} for n in (64, 128, 256)]
    >>> found = grown(rows, "bytes")
    >>> found.constant_bytes, round(found.token_bytes), round(found.pair_bytes), round(found.pairs_share, 2)
    (0.0, 200, 3, 0.49)
    """
    by_length = {row["seq_len"]: row for row in rows if row.get(name)}
    points = [(length, by_length[length]["num_tokens"], by_length[length][name]) for length in sorted(by_length)]
    if len(points) < 2:
        raise Unavailable(f"{name} has fewer than two lengths")
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


Fit = tuple[dict[int, float], float]  # factors of some of the three terms by place, and the largest relative error


def _least_error(fits: Iterable[Fit]) -> float:
    return min(error for _, error in fits)


def _fits(points: Sequence[tuple[int, int, int]]) -> Iterator[Fit]:
    """Yield the fit of every choice of terms without negative factors."""
    terms = [(1 / value, tokens / value, length**2 / value) for length, tokens, value in points]
    for number in range(1, min(3, len(points) - 1) + 1):
        for chosen in combinations(range(3), number):
            columns = [[at_length[place] for at_length in terms] for place in chosen]
            factors = _nearest_to_ones(columns)
            if min(factors) >= 0:
                sums = (sum(map(mul, factors, at_length)) for at_length in zip(*columns))
                yield dict(zip(chosen, factors)), max(abs(each - 1) for each in sums)


def _nearest_to_ones(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return the factors that make the columns sum to ones as closely as possible (normal equations)."""
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
    """Return `grown` in words: what follows "the peak".

    >>> grows([{"seq_len": n, "num_tokens": n, "bytes": 4096 + 8 * n} for n in (64, 128, 256, 512)], "bytes")
    'grows linearly (8.0 B per token + 4.00 KiB)'
    """
    records = [row for row in rows if row.get(name)]
    found = grown(records, name)
    shortest, longest = (choose(row["seq_len"] for row in records) for choose in (min, max))
    if found.error_share is None:
        return f"grows by {_bytes(found.token_bytes)} per token from {shortest} to {longest} tokens"
    terms = [f"{_bytes(found.pair_bytes)} per token pair"] if found.pair_bytes else []
    terms += [f"{_bytes(found.token_bytes)} per token"] if found.token_bytes else []
    terms += [_bytes(found.constant_bytes)] if found.constant_bytes else []
    off = "" if found.error_share <= EXACT_SHARE else f", up to {said('share', found.error_share)} off"
    if found.pair_bytes:
        share = said("share", found.pairs_share)
        return f"grows quadratically ({' + '.join(terms)}{off}; pairs are {share} at {longest} tokens)"
    return f"{'grows linearly' if found.token_bytes else 'does not grow'} ({' + '.join(terms)}{off})"


def _bytes(value: float) -> str:
    return f"{value:.1f} B" if value < 100 else said("bytes", value)


def growth_records(groups: Mapping[tuple[str, str], Rows], name: str) -> list[dict[str, Any]]:
    """Return one record per group with two lengths or more: its terms, and in words how it grows."""
    return [
        {"of": of, "variant": variant, "num_lengths": len(rows), "longest": max(rows.values("seq_len")),
         "peak_bytes": max(record[name] for record in rows), **grown(rows, name)._asdict(),
         "growth": grows(rows, name)}
        for (of, variant), rows in groups.items() if len(rows.values("seq_len")) > 1
    ]  # fmt: skip
