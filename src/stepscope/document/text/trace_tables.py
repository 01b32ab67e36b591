"""Tables for a terminal of any width: columns in line, names that still differ when they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.formatting import fit_names

LEAST_ROOM = 24
"""Characters that names should have, before a column is left out for them."""


@dataclass(frozen=True)
class Column:
    """One column of figures."""

    title: str
    cells: Sequence[str]
    rank: int = 0
    """Where there is no room for all columns, those of the highest rank are left out first; those of 0 never."""


def table_lines(
    title: str, names: Sequence[str], columns: Sequence[Column], width: int, head: float = 0.5
) -> list[str]:
    """A header and a line a name; no line is wider than `width`, unless columns that must be there are.

    Of a name that is cut, such a share is its `head` and the rest its end.

    >>> table_lines("ops", ["aten::mm"], [Column("calls", ["80"]), Column("share", ["27.5 %"])], 60)
    ['ops         calls   share', '  aten::mm     80  27.5 %']
    """
    kept = list(columns)
    longest = max((len(name) for name in names), default=0)
    while (room := width - 2 - sum(_width(column) + 2 for column in kept)) < min(LEAST_ROOM, longest):
        extra = max(kept, key=lambda column: column.rank)
        if not extra.rank:
            break
        kept.remove(extra)
    room = max(1, min(room, max(longest, len(title) - 2)))
    titles = "".join(f"  {column.title:>{_width(column)}}" for column in kept)
    lines = [f"{title:<{room + 2}}{titles}"] if len(title) <= room + 2 else [title, " " * (room + 2) + titles]
    for place, name in enumerate(fit_names(names, room, head)):
        cells = "".join(f"  {column.cells[place]:>{_width(column)}}" for column in kept)
        lines.append(f"  {name:<{room}}{cells}")
    return lines


def _width(column: Column) -> int:
    return max(len(column.title), *(len(cell) for cell in column.cells), 0)
