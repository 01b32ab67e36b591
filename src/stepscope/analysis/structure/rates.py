"""Rates."""

from __future__ import annotations

import polars as pl


def bandwidth(num_bytes: pl.Expr, duration_ns: pl.Expr) -> pl.Expr:
    """Return bytes per second as an integer; null if either is unknown or no time passed.

    >>> pl.select(bandwidth(pl.lit(3), pl.lit(2))).item()
    1500000000
    """
    return pl.when(duration_ns > 0).then((num_bytes * 1e9 / duration_ns).round()).cast(pl.Int64, strict=False)
