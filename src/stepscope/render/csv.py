"""Tables as CSV: raw figures under names that end in their unit, and no cell that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.document.model import Table
from stepscope.formatting import safe

_LONGEST_CELL = 32_000
"""A spreadsheet's cell ends at 32,767 characters."""
# What makes a spreadsheet run a cell, also as its wide twin, behind spaces or quotes; and behind a semicolon, where
# half of the world's spreadsheets begin a new cell.
_FORMULA = re.compile(r"""(?:^|(?<=;))(?=[\s"'`]*[=+\-@＝＋－＠])""")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def csv_of(table: Table) -> str:
    """All rows of a table, a header of column names before them."""
    return csv_text(table.columns)


def csv_text(columns: Mapping[str, Sequence[Any]]) -> str:
    r"""Columns as RFC 4180 has them, lines ending in `\n`; what is not there, or no number, is an empty cell.

    >>> csv_text({"name": ["a, b", "=1+1"], "total_ns": [-3, None]})
    'name,total_ns\n"a, b",-3\n\'=1+1,\n'
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([guarded(name) for name in columns])
    for row in zip(*columns.values()):
        cells = [csv_cell(value) for value in row]
        # A line of nothing would be no row at all.
        stream.write('""\n') if cells == [""] else writer.writerow(cells)
    return stream.getvalue()


def csv_cell(value: Any) -> Any:
    """A value as it stands in a cell: a figure as it is, text guarded, what is not there empty."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return value if isinstance(value, (int, float)) else guarded(value)


def guarded(value: object) -> str:
    """Somebody else's text: no control characters, bounded, an apostrophe before what would be a formula."""
    text = safe(value, _LONGEST_CELL)
    return text if _NUMBER.fullmatch(text) else _FORMULA.sub("'", text)
