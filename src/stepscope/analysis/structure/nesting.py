"""Looking up a thread's tree of host events."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

_HIGHEST = 64
"""Steps up: a link by number may lead in a circle, in a trace that is not sound."""


def ancestor(host: pl.DataFrame, is_wanted: pl.Series) -> pl.Series:
    """For each row of a host table the innermost row at or above it that is wanted; null when there is none."""
    wanted = is_wanted.fill_null(False)
    parents: pl.Series = host["parent"]
    answer: pl.Series = pl.int_range(host.height, dtype=pl.UInt32, eager=True).zip_with(wanted, parents)
    while True:
        # Each row asks what its present candidate says: a wanted one names itself, another one further up. The
        # distance doubles each time.
        further = answer.gather(answer)
        if further.equals(answer):
            return answer
        answer = further


def climb(
    rows: pl.Series, above: Callable[[pl.Series], pl.Series], goes_up: Callable[[pl.Series, pl.Series], pl.Series]
) -> pl.Series:
    """Rows of the host table, each moved to the one `above` it as long as it `goes_up`, told both."""
    for _ in range(_HIGHEST):
        higher = above(rows)
        moves = (higher.is_not_null() & goes_up(rows, higher)).fill_null(False)
        if not moves.any():
            break
        rows = higher.zip_with(moves, rows)
    return rows


def outermost(host: pl.DataFrame, rows: pl.Series, names: frozenset[str]) -> pl.Series:
    """Rows of the host table, each moved up as long as the event above it has one of the names."""
    known = pl.Series(sorted(names), dtype=host.schema["name"]).implode()
    return climb(rows, host["parent"].gather, lambda _, above: host["name"].gather(above).is_in(known))
