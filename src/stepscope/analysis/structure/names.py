"""Functions of names and other texts, evaluated once per distinct text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl


def matches(names: pl.Series, pattern: str) -> pl.Series:
    """Return which names (Categorical) match a regular expression; null does not match.

    >>> matches(pl.Series(["aten::mm", "cudaLaunchKernel", None], dtype=pl.Categorical), "^aten").to_list()
    [True, False, False]
    """
    different = names.unique().drop_nulls()
    found = different.filter(different.cast(pl.String).str.contains(pattern))
    return names.is_in(found.implode()).fill_null(False)


def with_answers(
    table: pl.DataFrame,
    keys: Sequence[str],
    function: Callable[..., Sequence[Any]],
    schema: Mapping[str, pl.DataType],
) -> pl.DataFrame:
    """Return a table with columns (`schema`) that a function computes from the texts of its `keys`."""
    distinct = table.select(keys).unique(maintain_order=True)
    rows = [function(*texts) for texts in distinct.cast(pl.String).iter_rows()]
    answers = distinct.hstack(pl.DataFrame(rows, schema=schema, orient="row"))
    return table.join(answers, on=keys, how="left", nulls_equal=True, maintain_order="left")
