"""Query the tables of a trace with SQL.

PATH is a trace, a folder of ranks or a recording. Every table also has the columns `rank` and `file`: with several
traces, join on `file` too. docs/tables.md describes the tables.

examples:
  stepscope analyze --sql --tables
  stepscope analyze --sql trace.json.gz "select kind, count(*) as num from host group by kind"
  stepscope analyze --sql runs/ddp "select rank, sum(duration_ns) / 1e6 as ms from device group by rank"
  stepscope analyze --sql runs/ddp --rank 3 "select name, bytes from device where kind = 'memcpy'"
  stepscope analyze --sql trace.json.gz "select * from device where name like '%gemm%'" --csv > gemms.csv
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

from stepscope.cli.support.options import add_source_arguments, opened, positive
from stepscope.cli.support.output import is_terminal, tell, write
from stepscope.formatting import plural, safe, significant
from stepscope.session import need_read_side

if TYPE_CHECKING:
    import polars as pl

ROWS_SHOWN = 50
_ROWS_PER_CHUNK = 10_000
_LEAST_TEXT = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, add_form = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("path", type=Path, metavar="PATH", help="recording, trace or folder of ranks")
    add("query", metavar="QUERY", help="one SQL query, in Polars' dialect")
    add_form("--json", action="store_true", help="print all rows as a JSON list of objects")
    add_form("--csv", action="store_true", help="print all rows as CSV")
    add("--tables", action=_ListTables, help="list the tables and their columns, and exit")
    add("--limit", type=positive, metavar="N", help=f"at most N rows (default: {ROWS_SHOWN} on screen)")
    add("--memory-limit", metavar="MEMORY", help="memory for the query besides the tables (default 2GiB)")
    add_source_arguments(parser, "only this rank")


class _ListTables(argparse.Action):
    """Like `--version`: needs neither a trace nor a query."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        need_read_side()
        write(_list_of_tables())
        parser.exit()


def main(arguments: argparse.Namespace) -> int:
    need_read_side()
    from stepscope.session.sql import MEMORY_LIMIT_BYTES, refuse_other_than_query, run_query, tables_of
    from stepscope.sweep.memory import bytes_of

    refuse_other_than_query(arguments.query)
    memory_limit = bytes_of(arguments.memory_limit) or MEMORY_LIMIT_BYTES
    with opened(arguments, arguments.path) as session:
        tables = tables_of(session, lambda text: tell(f"stepscope analyze --sql: {text}"))
        answer = run_query(tables, arguments.query, memory_limit)
    limit = arguments.limit or (answer.height if arguments.json or arguments.csv else ROWS_SHOWN)
    shown = answer.head(limit)
    if arguments.json:
        write(_as_json(shown))
    else:
        write(_as_csv(shown) if arguments.csv else _as_table(shown, answer.height))
    return 0


def _list_of_tables() -> Iterator[str]:
    from stepscope.session.sql import type_in_words
    from stepscope.trace.tables import TABLES

    width = max(len(column.name) for table in TABLES for column in table.columns)
    for table in TABLES:
        yield f"{table.name}: {table.doc}\n"
        for column in table.columns:
            yield f"  {column.name:<{width}}  {type_in_words(column.dtype):<7}  {column.doc}\n"
        yield "\n"
    yield "Every table also has `rank` and `file`: with several traces, join on `file` too.\n"


def _as_json(frame: pl.DataFrame) -> Iterator[str]:
    """Return a JSON list with one object per line, in ASCII."""
    separator = "[\n"
    for part in map(_writable, frame.iter_slices(_ROWS_PER_CHUNK)):
        lines = part.write_ndjson().rstrip("\n").replace("\n", ",\n")
        yield separator + re.sub(r"[^\x00-\x7e]", lambda found: json.dumps(found[0])[1:-1], lines)
        separator = ",\n"
    yield "\n]\n" if frame.height else "[]\n"


def _as_csv(frame: pl.DataFrame) -> Iterator[str]:
    """Return CSV without a cell that a spreadsheet would run as a formula."""
    from stepscope.exporters.tables import for_spreadsheets
    from stepscope.render.csv import guarded

    for number, part in enumerate(frame.iter_slices(_ROWS_PER_CHUNK) if frame.height else [frame]):
        yield for_spreadsheets(_writable(part)).rename(guarded).write_csv(include_header=number == 0)


def _writable(frame: pl.DataFrame) -> pl.DataFrame:
    """Return columns that JSON and CSV have no form for, bytes and intervals, as the text in the table."""
    import polars as pl

    texts = [
        pl.Series(each.name, [None if value is None else str(value) for value in each.to_list()], pl.String)
        for each in frame
        if re.search("Binary|Duration|Object", str(each.dtype))
    ]
    return frame.with_columns(texts)


def _as_table(frame: pl.DataFrame, num_rows: int) -> Iterator[str]:
    """Return aligned columns, at most as wide as the terminal, and the number of rows."""
    is_number = [dtype.is_numeric() for dtype in frame.dtypes]
    rows = [[_cell(value) for value in row] for row in [frame.columns, *frame.iter_rows()]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    if is_terminal(sys.stdout):
        widths = fit(widths, is_number, shutil.get_terminal_size((100, 24)).columns)
    for row in rows:
        columns = zip(row, widths, is_number)
        cells = (f"{safe(cell, width):{'>' if right else '<'}{width}}" for cell, width, right in columns)
        yield "  ".join(cells).rstrip() + "\n"
    if len(rows) - 1 < num_rows:
        yield f"({len(rows) - 1:,} of {plural(num_rows, 'row')}: --limit N shows more, --csv and --json give all)\n"
    else:
        yield f"({plural(num_rows, 'row')})\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return significant(value, 6).replace(",", "")  # so that it can be pasted into a query
    return "null" if value is None else safe(value)


def fit(widths: Sequence[int], is_number: Sequence[bool], width: int) -> list[int]:
    """Return column widths that fit a line: numbers stay whole, the longest texts are cut.

    >>> fit([90, 6, 20], [False, True, False], 60)
    [30, 6, 20]
    """
    room = width - 2 * (len(widths) - 1) - sum(w for w, number in zip(widths, is_number) if number)
    texts = [w for w, number in zip(widths, is_number) if not number]
    longest = max(texts, default=0)
    while longest > _LEAST_TEXT and sum(min(w, longest) for w in texts) > room:
        longest -= 1
    return [w if number else min(w, longest) for w, number in zip(widths, is_number)]
