"""Looking up a thread's tree of host events."""

from __future__ import annotations

import polars as pl


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


def outermost(host: pl.DataFrame, rows: pl.Series, names: frozenset[str]) -> pl.Series:
    """Rows of the host table, each moved up as long as the event above it has one of the names."""
    known = pl.Series(sorted(names), dtype=host.schema["name"])
    for _ in range(16):
        above = host["parent"].gather(rows)
        goes_up = host["name"].gather(above).is_in(known.implode()).fill_null(False)
        if not goes_up.any():
            break
        rows = above.zip_with(goes_up, rows)
    return rows
