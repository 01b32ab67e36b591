"""Looking up a thread's tree of host events."""

from __future__ import annotations

import polars as pl


def ancestor(host: pl.DataFrame, is_wanted: pl.Series) -> pl.Series:
    """For each row of a host table the innermost row at or above it that is wanted; null when there is none."""
    wanted = is_wanted.fill_null(False)
    parents: pl.Series = host["parent"]
    answer: pl.Series = pl.Series(range(host.height), dtype=pl.UInt32).zip_with(wanted, parents)
    settled = wanted | parents.is_null()
    while not settled.all():
        # Each row that is not settled asks what its present candidate says.
        is_found = wanted.gather(answer).fill_null(False)
        answer = answer.zip_with(settled | is_found, parents.gather(answer))
        settled = settled | is_found | answer.is_null()
    found: pl.Series = answer
    return found
