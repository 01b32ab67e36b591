"""Regular expressions on names, evaluated once per distinct name."""

from __future__ import annotations

import polars as pl


def matches(names: pl.Series, pattern: str) -> pl.Series:
    """Return which names (Categorical) match a regular expression; null does not match.

    >>> matches(pl.Series(["aten::mm", "cudaLaunchKernel", None], dtype=pl.Categorical), "^aten").to_list()
    [True, False, False]
    """
    different = names.unique().drop_nulls()
    found = different.filter(different.cast(pl.String).str.contains(pattern))
    return names.is_in(found.implode()).fill_null(False)
