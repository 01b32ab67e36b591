"""Rows of a table as lines of JSON, column by column: a part without a value is left out."""

import json
from collections.abc import Callable, Iterator, Mapping

import msgspec
import polars as pl

ROWS_A_CHUNK = 50_000  # rows that are text at one time: what bounds the memory


def lines_of(frame: pl.DataFrame, line: Callable[[pl.DataFrame], pl.Expr]) -> Iterator[str]:
    """The lines of a table, a chunk at a time, separated by a comma and a new line."""
    for part in frame.iter_slices(ROWS_A_CHUNK):
        yield ",\n".join(part.select(line(part).alias("line"))["line"])


def event(args: Mapping[str, pl.Expr] | None = None, /, **fields: pl.Expr | str) -> pl.Expr:
    """One object a row from JSON texts by name, constant or not; those that are null are left out."""
    parts = [_pair(name, pl.lit(value) if isinstance(value, str) else value) for name, value in fields.items()]
    if args is not None:
        inside = pl.concat_str([_pair(name, value) for name, value in args.items()], separator=",", ignore_nulls=True)
        parts.append(_pair("args", pl.concat_str(pl.lit("{"), inside, pl.lit("}"))))
    whole = pl.concat_str(parts, separator=",", ignore_nulls=True)
    return pl.concat_str(pl.lit("{"), whole, pl.lit("}"))


def _pair(name: str, value: pl.Expr) -> pl.Expr:
    return pl.concat_str(pl.lit(f"{json.dumps(name)}:"), value)


def microseconds(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds, not negative, as microseconds with three decimals: exact, as the format wants them."""
    return pl.concat_str((ns // 1000).cast(pl.String), pl.lit("."), (ns % 1000).cast(pl.String).str.zfill(3))


def numbers(columns: Mapping[str, str]) -> dict[str, pl.Expr]:
    """Columns of numbers as JSON, by the name of the argument."""
    return {name: pl.col(column).cast(pl.String) for name, column in columns.items()}


def texts(frame: pl.DataFrame, columns: Mapping[str, str]) -> dict[str, pl.Expr]:
    """Return columns of untrusted text as JSON strings, in ASCII, by the name of the argument."""
    return {name: pl.lit(mapped(frame[column], json.dumps)) for name, column in columns.items()}


def recorded(frame: pl.DataFrame, columns: Mapping[str, str]) -> dict[str, pl.Expr]:
    """What was JSON when it was recorded as that JSON again; what was none, as a text."""
    return {name: pl.lit(mapped(frame[column], _json_or_text)) for name, column in columns.items()}


def id_of(value: str | None) -> str:
    """A process or a thread as JSON: a number where it is one, as profilers write them.

    >>> id_of("42"), id_of("Spans"), id_of("007"), id_of(None)
    ('42', '"Spans"', '"007"', '"unknown"')
    """
    if value is None:
        return '"unknown"'
    is_number = value.isascii() and value.removeprefix("-").isdigit() and str(int(value[:18])) == value
    return value if is_number else json.dumps(value)


def mapped(column: pl.Series, to: Callable[[str], str]) -> pl.Series:
    """A column of texts as other texts; each different one is made once."""
    values = column.cast(pl.String)
    different = values.drop_nulls().unique()
    made: pl.Series = values.replace_strict(different, [to(one) for one in different], return_dtype=pl.String)
    return made


def _json_or_text(value: str) -> str:
    try:
        msgspec.json.decode(value)
    except (ValueError, RecursionError):  # msgspec's DecodeError is a ValueError
        return json.dumps(value)
    return value
