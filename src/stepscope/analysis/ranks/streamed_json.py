"""JSON of results with tables in them, as plain values or as text in pieces that never hold the whole."""

import json
from collections.abc import Iterator
from typing import Any

import polars as pl

_ROWS_AT_A_TIME = 1000


def plain(value: Any) -> Any:
    """Return a value with its tables as lists of objects, and its iterators as lists.

    >>> plain({"rows": pl.DataFrame({"a": [1, 2]}), "more": iter([3])})
    {'rows': [{'a': 1}, {'a': 2}], 'more': [3]}
    """
    if isinstance(value, pl.DataFrame):
        return value.to_dicts()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, Iterator) else value


def text_of(value: Any) -> Iterator[str]:
    """Yield the JSON of `plain(value)` in pieces.

    >>> "".join(text_of({"rows": pl.DataFrame({"a": [1, 2]}), "more": iter([3])}))
    '{"rows": [{"a": 1}, {"a": 2}], "more": [3]}'
    """
    if isinstance(value, pl.DataFrame):
        yield "["
        for start in range(0, value.height, _ROWS_AT_A_TIME):
            rows = json.dumps(value.slice(start, _ROWS_AT_A_TIME).to_dicts(), allow_nan=False)
            yield (", " if start else "") + rows[1:-1]
        yield "]"
    elif isinstance(value, dict):
        for place, (name, each) in enumerate(value.items()):
            yield f"{', ' if place else '{'}{json.dumps(name)}: "
            yield from text_of(each)
        yield "}" if value else "{}"
    elif isinstance(value, Iterator):
        yield "["
        for place, each in enumerate(value):
            yield ", " if place else ""
            yield from text_of(each)
        yield "]"
    else:
        yield json.dumps(value, allow_nan=False)
