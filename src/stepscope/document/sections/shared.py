"""What section builders share: tables from data frames, series of bounded length, facts that may be absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.analysis.memory.timeline import thinned_indices
from stepscope.document.model import Fact, Series, Table, Value

if TYPE_CHECKING:
    import polars as pl

MOST_POINTS = 2000
"""Points of a line: more cannot be told apart on a page."""


def table_of(
    frame: pl.DataFrame,
    id: str,
    title: str,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    num_shown: int = 12,
    note: str = "",
    screen: tuple[str, ...] = (),
    page_only: bool = False,
) -> Table:
    """Return a data frame as a table: all columns, those named, or those named under other names ({"old": "new"}).

    >>> import polars as pl
    >>> table_of(pl.DataFrame({"a": [1], "b": [[2, 3]]}), "t", "a table", {"b": "shape"}).columns
    {'shape': ['[2, 3]']}
    """
    names = columns if isinstance(columns, Mapping) else {name: name for name in columns or frame.columns}
    values = {shown: [plain(value) for value in frame[name].to_list()] for name, shown in names.items()}
    return Table(id, title, values, num_shown, note, screen, page_only=page_only)


def table_of_rows(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], id: str, title: str, note: str = ""
) -> Table:
    """Return rows as a table of these columns; None for what a row lacks."""
    kept = list(rows)
    return Table(id, title, {name: [plain(row.get(name)) for row in kept] for name in columns}, note=note)


def plain(value: Any) -> Value:
    """Return a value of a table: numbers, texts and None as they are, everything else as text.

    >>> plain(2.5), plain(float("nan")), plain([1, 2]), plain(None)
    (2.5, nan, '[1, 2]', None)
    """
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a field of a JSON file that should be an object; empty if it is not."""
    return value if isinstance(value, Mapping) else {}


def known(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Return the facts that have a value."""
    return tuple(fact for fact in facts if fact.value)


def thinned(name: str, x: Sequence[float], y: Sequence[float], color: str | None = None) -> Series:
    """Return a series of at most `MOST_POINTS` points that keeps both ends and the extremes of each stretch.

    >>> len(thinned("many", range(100_000), range(100_000)).y) <= MOST_POINTS
    True
    """
    kept = thinned_indices(y, MOST_POINTS)
    return Series(name, [y[i] for i in kept], [x[i] for i in kept], color)


def thinning(series: Iterable[Series], num_points: int) -> str:
    """Return the sentence that says how many points were left out; empty if none were."""
    num_drawn = sum(len(one.y) for one in series)
    if num_drawn >= num_points:
        return ""
    return f" Shows {num_drawn:,} of {num_points:,} points, with the extremes of every stretch."
