"""Lookups in a thread's tree of host events."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

_HIGHEST = 64  # limit on steps up: links in a damaged trace may form a cycle


def ancestor(host: pl.DataFrame, is_wanted: pl.Series) -> pl.Series:
    """Return for each row the innermost row at or above it that is wanted, or null."""
    wanted = is_wanted.fill_null(False)
    parents: pl.Series = host["parent"]
    answer: pl.Series = pl.int_range(host.height, dtype=pl.UInt32, eager=True).zip_with(wanted, parents)
    while True:
        # Pointer doubling: a wanted row names itself, any other the candidate of its candidate.
        further = answer.gather(answer)
        if further.equals(answer):
            return answer
        answer = further


def climb(
    rows: pl.Series, above: Callable[[pl.Series], pl.Series], goes_up: Callable[[pl.Series, pl.Series], pl.Series]
) -> pl.Series:
    """Return rows moved up to the row `above` them as long as `goes_up` holds."""
    for _ in range(_HIGHEST):
        higher = above(rows)
        moves = (higher.is_not_null() & goes_up(rows, higher)).fill_null(False)
        if not moves.any():
            break
        rows = higher.zip_with(moves, rows)
    return rows


def outermost(host: pl.DataFrame, rows: pl.Series, names: frozenset[str]) -> pl.Series:
    """Return rows moved up as long as the event above has one of the names."""
    known = pl.Series(sorted(names), dtype=host.schema["name"]).implode()
    return climb(rows, host["parent"].gather, lambda _, above: host["name"].gather(above).is_in(known))
