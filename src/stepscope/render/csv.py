"""Renders tables as CSV: raw numbers, and no cell that a spreadsheet would run as a formula."""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.document.model import Table
from stepscope.formatting import safe

_LONGEST_CELL = 32_000  # spreadsheets limit a cell to 32,767 characters
# What starts a formula: also full-width characters, after spaces or quotes, and after a semicolon, which many
# locales read as a separator.
_FORMULA = re.compile(r"""(?:^|(?<=;))(?=[\s"'`]*[=+\-@＝＋－＠])""")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def csv_of(table: Table) -> str:
    return csv_text(table.columns)


def csv_text(columns: Mapping[str, Sequence[Any]]) -> str:
    r"""Return columns as CSV (RFC 4180, lines end in `\n`); missing values and NaN are empty cells.

    >>> csv_text({"name": ["a, b", "=1+1"], "total_ns": [-3, None]})
    'name,total_ns\n"a, b",-3\n\'=1+1,\n'
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([guarded(name) for name in columns])
    for row in zip(*columns.values()):
        cells = [csv_cell(value) for value in row]
        # An empty line would not count as a row.
        stream.write('""\n') if cells == [""] else writer.writerow(cells)
    return stream.getvalue()


def csv_cell(value: Any) -> Any:
    """Return a value as a cell: numbers as they are, text guarded, missing values empty."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return value if isinstance(value, (int, float)) else guarded(value)


def guarded(value: object) -> str:
    """Return text without control characters, with an apostrophe before what would be a formula."""
    text = safe(value, _LONGEST_CELL)
    return text if _NUMBER.fullmatch(text) else _FORMULA.sub("'", text)
