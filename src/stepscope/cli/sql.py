"""Query a trace's tables.

PATH is a trace, a folder of ranks or a recording. Every table also has the columns `rank` and `file`: with several
traces, join on `file` too. docs/tables.md describes the tables.

examples:
  stepscope sql --tables
  stepscope sql trace.json.gz "select kind, count(*) as num from host group by kind"
  stepscope sql runs/ddp "select rank, sum(duration_ns) / 1e6 as ms from device group by rank"
  stepscope sql runs/ddp --rank 3 "select name, bytes from device where kind = 'memcpy'"
  stepscope sql trace.json.gz "select * from device where name like '%gemm%'" --csv > gemms.csv
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stepscope.cli.support.numbers import positive
from stepscope.cli.support.output import is_terminal, tell, write
from stepscope.errors import UsageError
from stepscope.formatting import plural, safe, significant
from stepscope.session import need_read_side

if TYPE_CHECKING:
    import polars as pl

    from stepscope.trace.tables import Trace

ROWS_SHOWN = 50
_ROWS_A_CHUNK = 10_000
_LEAST_TEXT = 12
_LONGEST_ERROR = 400

_QUERIES = ("select", "with", "from", "values", "show", "explain")
_FIRST_WORD = re.compile(r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(\w*)", re.DOTALL)
# Polars' SQL has functions that stand for a table and read it from a file, or from the network: `read_csv('…')`.
# A name of that kind before a parenthesis is refused wherever it stands, also in a string: telling strings from
# the rest exactly as Polars does would be a parser, and a hole where it differs.
_FILE_FUNCTION = re.compile(r"(?<!\w)((?:read|scan)_\w+)[\"`]?\s*(\(|--|/\*)", re.IGNORECASE)
# What reads a file, in a plan; a table of ours is `DF [`.
_FILE_IN_PLAN = re.compile(r"^\s*\w+ SCAN\b", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a recording, a trace, a folder of ranks")
    parser.add_argument("query", metavar="QUERY", help="one SQL query, in Polars' dialect")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all rows as a JSON list of objects")
    form.add_argument("--csv", action="store_true", help="all rows as CSV")
    parser.add_argument("--tables", action=_ListTables, help="list the tables and their columns, and nothing else")
    parser.add_argument("--rank", type=int, metavar="R", help="read this rank alone")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help=f"at most N rows (default: {ROWS_SHOWN} as a table, else all)"
    )
    parser.add_argument("--no-cache", action="store_true", help="read the trace itself, and keep nothing of it")


class _ListTables(argparse.Action):
    """As `--version` does: needs neither a trace nor a query."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        need_read_side()
        write(_list_of_tables())
        parser.exit()


def main(arguments: argparse.Namespace) -> int:
    need_read_side()
    refuse_what_is_no_query(arguments.query)
    tables = tables_at(arguments.path, not arguments.no_cache, arguments.rank)
    answer = run_query(tables, arguments.query)
    limit = arguments.limit or (answer.height if arguments.json or arguments.csv else ROWS_SHOWN)
    shown = answer.head(limit)
    if arguments.json:
        write(_as_json(shown))
    else:
        write(_as_csv(shown) if arguments.csv else _as_table(shown, answer.height))
    return 0


def refuse_what_is_no_query(query: str) -> None:
    """Raise UsageError for what would do anything else than look at the trace's tables."""
    first = _FIRST_WORD.match(query)
    if first is None or first[1].lower() not in _QUERIES:
        raise UsageError(f"only queries are run: {safe(query, 60)!r} does not begin with select or with")
    function = _FILE_FUNCTION.search(query)
    if function:
        raise UsageError(f"{safe(function[1])}() is refused: a query sees the trace's tables and no other file")


def tables_at(path: Path | None, use_cache: bool, rank: int | None = None) -> dict[str, pl.LazyFrame]:
    """The tables of all traces at `path`, or of one rank's; names and kinds as plain text, which SQL expects."""
    import polars as pl
    import polars.selectors as cs

    from stepscope.cli.support.progress import Progress
    from stepscope.session import open_session
    from stepscope.trace.schema import TABLES

    with Progress("reading") as progress:
        traces = list(open_session(path, rank=rank, use_cache=use_cache, progress=progress).traces())
    parts: dict[str, list[pl.LazyFrame]] = {table.name: [] for table in TABLES}
    for opened in traces:
        _warn(opened.trace)
        whose = [
            pl.lit(opened.rank if opened.is_known else None, pl.Int64).alias("rank"),
            pl.lit(str(opened.path)).alias("file"),
        ]
        for table in TABLES:
            # Lazily: a column that the query does not name costs nothing.
            part = getattr(opened.trace, table.name).lazy()
            parts[table.name].append(part.with_columns((cs.categorical() | cs.enum()).cast(pl.String), *whose))
    return {name: pl.concat(frames) for name, frames in parts.items()}


def run_query(tables: dict[str, pl.LazyFrame], query: str) -> pl.DataFrame:
    """The rows of one query; UsageError in one line when it is wrong."""
    import polars as pl
    import polars.selectors as cs

    try:
        lazy = pl.SQLContext(tables).execute(query, eager=False)
        if _FILE_IN_PLAN.search(lazy.explain(optimized=False)):
            raise UsageError("a query sees the trace's tables and no other file")
        # Polars takes 100.0 for a decimal; nobody who writes it into a query means one.
        return lazy.with_columns(cs.decimal().cast(pl.Float64)).collect()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = lines[0].removeprefix("sql parser error: ")
        raise UsageError(f"{safe(what, _LONGEST_ERROR)} (tables: {', '.join(tables)})") from None


def type_in_words(dtype: pl.DataType | type[pl.DataType]) -> str:
    """A column's type as a query sees it: `integer`, `number` or `text`."""
    return "integer" if dtype.is_integer() else "number" if dtype.is_numeric() else "text"


def _warn(trace: Trace) -> None:
    warnings = list(trace.warnings)
    if trace.num_problems:
        first = trace.problems[0]
        warnings.append(f"{plural(trace.num_problems, 'problem')}, the first at byte {first.offset:,}: {first.what}")
    for warning in warnings:
        tell(f"stepscope sql: {safe(trace.path.name)}: {safe(warning, _LONGEST_ERROR)}")


def _list_of_tables() -> Iterator[str]:
    from stepscope.trace.schema import TABLES

    width = max(len(column.name) for table in TABLES for column in table.columns)
    for table in TABLES:
        yield f"{table.name}: {table.doc}\n"
        for column in table.columns:
            yield f"  {column.name:<{width}}  {type_in_words(column.dtype):<7}  {column.doc}\n"
        yield "\n"
    yield "Every table also has `rank` and `file`: with several traces, join on `file` too.\n"


def _as_json(frame: pl.DataFrame) -> Iterator[str]:
    """A list with one object a line, in ASCII."""
    separator = "[\n"
    for part in frame.iter_slices(_ROWS_A_CHUNK):
        lines = part.write_ndjson().rstrip("\n").replace("\n", ",\n")
        yield separator + re.sub(r"[^\x00-\x7e]", lambda found: json.dumps(found[0])[1:-1], lines)
        separator = ",\n"
    yield "\n]\n" if frame.height else "[]\n"


def _as_csv(frame: pl.DataFrame) -> Iterator[str]:
    import polars as pl

    is_for_eyes = is_terminal(sys.stdout)
    try:
        yield from (
            _clean(text) if is_for_eyes else text
            for text in (
                part.write_csv(include_header=part_number == 0)
                for part_number, part in enumerate(frame.iter_slices(_ROWS_A_CHUNK) if frame.height else [frame])
            )
        )
    except pl.exceptions.ComputeError:
        raise UsageError("CSV has no lists: use --json") from None


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _as_table(frame: pl.DataFrame, num_rows: int) -> Iterator[str]:
    """Aligned columns, as wide as the terminal where there is one, and how many rows there are in all."""
    is_number = [dtype.is_numeric() for dtype in frame.dtypes]
    rows = [[_cell(value) for value in row] for row in [frame.columns, *frame.iter_rows()]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    if is_terminal(sys.stdout):
        widths = fit(widths, is_number, shutil.get_terminal_size((100, 24)).columns)
    for row in rows:
        cells = (
            f"{safe(cell, width):>{width}}" if right else f"{safe(cell, width):<{width}}"
            for cell, width, right in zip(row, widths, is_number)
        )
        yield "  ".join(cells).rstrip() + "\n"
    if len(rows) - 1 < num_rows:
        yield f"({len(rows) - 1:,} of {plural(num_rows, 'row')}: --limit N shows more, --csv and --json give all)\n"
    else:
        yield f"({plural(num_rows, 'row')})\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return significant(value, 6).replace(",", "")  # to be pasted into the next query
    return "null" if value is None else safe(value)


def fit(widths: Sequence[int], is_number: Sequence[bool], width: int) -> list[int]:
    """Widths of columns on a line so wide: numbers stay whole, text gives way, the longest first.

    >>> fit([90, 6, 20], [False, True, False], 60)
    [30, 6, 20]
    """
    room = width - 2 * (len(widths) - 1) - sum(w for w, number in zip(widths, is_number) if number)
    texts = [w for w, number in zip(widths, is_number) if not number]
    longest = max(texts, default=0)
    while longest > _LEAST_TEXT and sum(min(w, longest) for w in texts) > room:
        longest -= 1
    return [w if number else min(w, longest) for w, number in zip(widths, is_number)]
