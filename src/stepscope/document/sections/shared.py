"""What sections share: tables from data frames and rows, series that are not too long, facts that may be absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from stepscope.analysis.memory.timeline import thinned_indices
from stepscope.document.model import Fact, Series, Table, Value

MOST_POINTS = 2000
"""Of a line: more are not told apart on a page."""


def table_of(
    frame: pl.DataFrame,
    id: str,
    title: str,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    num_shown: int = 12,
    note: str = "",
) -> Table:
    """A data frame as a table: all columns, those named, or those named under other names ({"of_frame": "shown"}).

    >>> table_of(pl.DataFrame({"a": [1], "b": [[2, 3]]}), "t", "a table", {"b": "shape"}).columns
    {'shape': ['[2, 3]']}
    """
    names = columns if isinstance(columns, Mapping) else {name: name for name in columns or frame.columns}
    values = {shown: [plain(value) for value in frame[name].to_list()] for name, shown in names.items()}
    return Table(id, title, values, num_shown, note)


def table_of_rows(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], id: str, title: str, note: str = ""
) -> Table:
    """Rows as a table of these columns; what a row lacks is not known there."""
    kept = list(rows)
    return Table(id, title, {name: [plain(row.get(name)) for row in kept] for name in columns}, note=note)


def plain(value: Any) -> Value:
    """A value of a table: numbers as they are, also those that are none, all else as text.

    >>> plain(2.5), plain(float("nan")), plain([1, 2]), plain(None)
    (2.5, nan, '[1, 2]', None)
    """
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """A field of somebody's JSON that should be an object: empty where it is not."""
    return value if isinstance(value, Mapping) else {}


def known(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Facts without those that have nothing to say."""
    return tuple(fact for fact in facts if fact.value)


def thinned(name: str, x: Sequence[float], y: Sequence[float], color: str | None = None) -> Series:
    """A series of no more than `MOST_POINTS`: both ends, and of each stretch of x the least and the largest are kept.

    >>> len(thinned("many", range(100_000), range(100_000)).y) <= MOST_POINTS
    True
    """
    kept = thinned_indices(y, MOST_POINTS)
    return Series(name, [y[i] for i in kept], [x[i] for i in kept], color)


def thinning(series: Iterable[Series], num_points: int) -> str:
    """What is said where points were left out; "" where none were."""
    num_drawn = sum(len(one.y) for one in series)
    if num_drawn >= num_points:
        return ""
    return f" Drawn are {num_drawn:,} of {num_points:,} points: the least and the largest of every stretch."
