"""Recorded values as columns; invalid values become null, never an error."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import polars as pl

from stepscope.border import limit


def times(joined: bytes) -> pl.Series:
    """Return comma-separated microseconds (text) as integer nanoseconds, exactly; null if not a number.

    Digits beyond the nanosecond are rounded.

    >>> times(b"1694128201545123.456,7,").to_list()
    [1694128201545123456, 7000, None]
    """
    text = joined.decode("ascii", errors="replace")
    if '"' in text:
        text = text.replace('"', "")  # some producers write numbers as text
    parts = pl.lit(text).str.split(",").explode(empty_as_null=False)
    thousandths = parts.cast(pl.Decimal(38, 3), strict=False).to_physical()
    return pl.select(thousandths.cast(pl.Int64, strict=False)).to_series()


def integers(values: Sequence[Any]) -> pl.Series:
    """Return integers; anything else (text, a number too large) becomes null.

    >>> integers([7, "8", "x", 2**70]).to_list()
    [7, 8, None, None]
    """
    return _numbers(values, pl.Int64(), integer)


def floats(values: Sequence[Any]) -> pl.Series:
    """Return numbers; anything else, and infinities, become null."""
    series = _numbers(values, pl.Float64(), partial(_try, float))
    return series.set(~series.is_finite(), None)


def _numbers(values: Sequence[Any], dtype: pl.DataType, convert: Callable[[Any], Any]) -> pl.Series:
    try:
        return pl.Series(values, dtype=dtype)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        return pl.Series([convert(value) for value in values], dtype=dtype)


def texts(values: Sequence[Any]) -> pl.Series:
    return categories(names([None if value is None else str(value) for value in values]))


def names(different: Iterable[str | None]) -> list[str | None]:
    """Return names, none longer than the limit: searching them for patterns takes time for each place."""
    most = limit("NAME")
    return [(each if len(each) <= most else f"{each[:most]}…") if each else None for each in different]


def categories(different: list[str | None]) -> pl.Series:
    return pl.Series(different, dtype=pl.Categorical)


def json_texts(written: Iterable[bytes]) -> list[str | None]:
    """Return JSON values as recorded, each on one line; null if there is none.

    >>> json_texts([b"[[8,  3],[]]", b'"[0, 1]"', b"null"])
    ['[[8, 3], []]', '[0, 1]', None]
    """
    return [_one_line(value) for value in written]


def _one_line(value: bytes) -> str | None:
    if value in (b"", b"null"):
        return None
    try:
        if value.startswith(b'"'):  # JSON in a text, like the ranks of a group
            return msgspec.json.decode(value, type=str) or None
        value = msgspec.json.format(value, indent=0)
    except (ValueError, RecursionError):
        pass
    return value.decode("utf-8", errors="replace")


def id_text(value: Any) -> str | None:
    """Return a process or thread as text: the same for 7, 7.0 and "7"."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and not value.is_integer():
        return str(value)
    return str(int(value))


def integer(value: Any) -> int | None:
    """Return a value as an integer of 64 bits; None if it is not one."""
    number: int | None = _try(int, value)
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _try(convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError):
        return None
