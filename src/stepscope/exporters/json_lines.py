"""Rows of a table as lines of JSON, column by column: a part without a value is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import msgspec
import polars as pl

ROWS_A_CHUNK = 50_000
"""Rows that are text at one time: what bounds the memory."""

_as_json = json.dumps


def lines_of(frame: pl.DataFrame, line: Callable[[pl.DataFrame], pl.Expr]) -> Iterator[str]:
    """The lines of a table, a chunk at a time, separated by a comma and a new line."""
    for part in frame.iter_slices(ROWS_A_CHUNK):
        yield ",\n".join(part.select(line(part).alias("line"))["line"])


def event(fields: Mapping[str, pl.Expr | str], args: Mapping[str, pl.Expr] | None = None) -> pl.Expr:
    """One object a row from JSON texts by name, constant or not; those that are null are left out."""
    parts = [pl.concat_str(pl.lit(f'"{name}":'), _expression(value)) for name, value in fields.items()]
    if args is not None:
        inside = [pl.concat_str(pl.lit(f"{_as_json(name)}:"), value) for name, value in args.items()]
        together = pl.concat_str(inside, separator=",", ignore_nulls=True) if inside else pl.lit("")
        parts.append(pl.concat_str(pl.lit('"args":{'), together, pl.lit("}")))
    whole = pl.concat_str(parts, separator=",", ignore_nulls=True)
    return pl.concat_str(pl.lit("{"), whole, pl.lit("}"))


def microseconds(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds, not negative, as microseconds with three decimals: exact, as the format wants them."""
    return pl.concat_str((ns // 1000).cast(pl.String), pl.lit("."), (ns % 1000).cast(pl.String).str.zfill(3))


def number(column: str) -> pl.Expr:
    return pl.col(column).cast(pl.String)


def text(frame: pl.DataFrame, column: str) -> pl.Expr:
    """Somebody's text as a JSON text, in ASCII."""
    return _mapped(frame[column], _as_json)


def recorded(frame: pl.DataFrame, column: str) -> pl.Expr:
    """What was JSON when it was recorded as that JSON again; what was none, as a text."""
    return _mapped(frame[column], _json_or_text)


def id_of(value: str | None) -> str:
    """A process or a thread as JSON: a number where it is one, as profilers write them.

    >>> id_of("42"), id_of("Spans"), id_of("007"), id_of(None)
    ('42', '"Spans"', '"007"', '"unknown"')
    """
    if value is None:
        return '"unknown"'
    is_number = value.isascii() and value.removeprefix("-").isdigit() and str(int(value[:18])) == value
    return value if is_number else _as_json(value)


def _expression(value: pl.Expr | str) -> pl.Expr:
    return pl.lit(value) if isinstance(value, str) else value


def _mapped(column: pl.Series, to: Callable[[str], str]) -> pl.Expr:
    texts = column.cast(pl.String)
    different = texts.drop_nulls().unique()
    return pl.lit(texts.replace_strict(different, [to(one) for one in different], return_dtype=pl.String))


def _json_or_text(value: str) -> str:
    try:
        msgspec.json.decode(value)
    except (ValueError, RecursionError):  # msgspec's DecodeError is a ValueError
        return _as_json(value)
    return value
