"""Tables of documents, from data frames and from rows of any kind; thinned series; facts that may be absent.

Columns are named in one text: `op total_ns` are columns as they are, `each_bytes:bytes` is `bytes` renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.analysis.memory.timeline import thinned_indices
from stepscope.document.model import Fact, Series, Table, Value

if TYPE_CHECKING:
    import polars as pl

MOST_POINTS = 2000  # points of a line: more cannot be told apart on a page


def table_of(frame: pl.DataFrame, id: str, title: str, names: str = "", num_shown: int = 12, **more: Any) -> Table:
    """Return a data frame as a table, with all columns or those named; `more` are other fields of the table.

    >>> import polars as pl
    >>> table_of(pl.DataFrame({"a": [1], "b": [[2, 3]]}), "t", "a table", "shape:b").columns
    {'shape': ['[2, 3]']}
    """
    fields = _fields(names) if names else zip(frame.columns, frame.columns)
    columns = {name: [plain(value) for value in frame[field].to_list()] for name, field in fields}
    return Table(id, title, columns, num_shown, **more)


def columns_of(rows: Iterable[Any], names: str, **computed: Callable[[Any], Any]) -> dict[str, list[Any]]:
    """Return columns of objects or mappings; those in `computed` are what a function makes of each row.

    >>> columns_of([{"bytes": 3}], "each_bytes:bytes twice", twice=lambda row: 2 * row["bytes"])
    {'each_bytes': [3], 'twice': [6]}
    """
    kept = list(rows)
    return {name: [*map(computed.get(name) or _reader(field), kept)] for name, field in _fields(names)}


def _fields(names: str) -> list[tuple[str, str]]:
    return [(name, field or name) for name, _, field in (word.partition(":") for word in names.split())]


def _reader(name: str) -> Callable[[Any], Any]:
    return lambda row: row.get(name) if isinstance(row, Mapping) else getattr(row, name)


def without_empty(columns: Mapping[str, Sequence[Value]]) -> dict[str, Sequence[Value]]:
    """Return the columns of which at least one value is known."""
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


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
    return tuple(fact for fact in facts if fact.value)


def thinned(name: str, x: Sequence[float], y: Sequence[float]) -> Series:
    """Return a series of at most `MOST_POINTS` points that keeps both ends and the extremes of each stretch.

    >>> len(thinned("many", range(100_000), range(100_000)).y) <= MOST_POINTS
    True
    """
    kept = thinned_indices(y, MOST_POINTS)
    return Series(name, [y[i] for i in kept], [x[i] for i in kept])


def thinning(series: Iterable[Series], num_points: int) -> str:
    """Return the sentence that says how many points were left out; empty if none were."""
    num_drawn = sum(len(one.y) for one in series)
    if num_drawn >= num_points:
        return ""
    return f" Shows {num_drawn:,} of {num_points:,} points, with the extremes of every stretch."
