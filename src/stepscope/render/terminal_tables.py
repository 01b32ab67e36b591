"""Tables as lines of text for any width: columns aligned, names cut so that different names stay different."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.document.model import Table
from stepscope.formatting import cell, fit_names, is_numeric, safe, shortened, title_of

NAME_WIDTH = 24  # characters that the first column keeps before other columns are dropped for it
TEXT_WIDTH = 16  # characters that other text columns keep before columns are dropped
_LEAST_WIDTH = 6
_MOST_CHARACTERS = 400


def table_lines(table: Table, num_rows: int, width: int) -> list[str]:
    """Return a header and `num_rows` lines of at most `width` columns; columns last in `screen` are dropped first.

    >>> table_lines(Table("ops", "Ops", {"op": ["aten::mm"], "num_calls": [80], "share": [0.275]}), 1, 60)
    ['op        calls   share', 'aten::mm     80  27.5 %']
    """
    texts, is_text = _fitting(table, num_rows, width)
    titles = {name: title_of(name) for name in texts}
    widths = {name: max(len(titles[name]), *map(len, cells), 1) for name, cells in texts.items()}
    while sum(widths.values()) + 2 * (len(widths) - 1) > width:
        widest = max((name for name in widths if is_text[name]), key=lambda name: widths[name], default=None)
        if widest is None or widths[widest] <= _LEAST_WIDTH:
            break
        widths[widest] -= 1
    columns = {name: fit_names(cells, widths[name]) if is_text[name] else cells for name, cells in texts.items()}
    rows = [[titles[name] for name in columns], *zip(*columns.values())]
    return [
        "  ".join(
            shortened(text, widths[name], 1.0).ljust(widths[name]) if is_text[name] else text.rjust(widths[name])
            for name, text in zip(columns, row)
        ).rstrip()
        for row in rows
    ]


def dropped_columns(table: Table, num_rows: int, width: int) -> list[str]:
    """Return the columns that a terminal of this width has no room for."""
    texts, _ = _fitting(table, num_rows, width)
    return [name for name in table.screen or table.columns if name in table.columns and name not in texts]


def _fitting(table: Table, num_rows: int, width: int) -> tuple[dict[str, list[str]], dict[str, bool]]:
    """Return the cells of the columns that fit, and which of them are text."""
    order = [name for name in table.screen if name in table.columns] or list(table.columns)
    texts = {
        name: [safe(cell(name, value), _MOST_CHARACTERS) for value in values[:num_rows]]
        for name, values in table.columns.items()
        if name in order
    }
    is_text = {name: not is_numeric(table.columns[name]) and not _are_figures(texts[name]) for name in texts}
    first = next(iter(texts), "")
    while len(texts) > 1 and _least(texts, is_text, first) > width:
        del texts[next(name for name in reversed(order) if name in texts and name != first)]
    return texts, is_text


def _are_figures(cells: Sequence[str]) -> bool:
    """Whether texts are figures with units: they are aligned like numbers, and never cut."""
    return any(cells) and all(not text or (text[0] in "+-−–" or text[0].isdigit()) for text in cells)


def _least(texts: dict[str, list[str]], is_text: dict[str, bool], first: str) -> int:
    """Return how wide the table is at least, with names cut as far as they may be."""
    total = 2 * (len(texts) - 1)
    for name, cells in texts.items():
        longest = max(len(title_of(name)), *map(len, cells), 1)
        total += min(longest, NAME_WIDTH if name == first else TEXT_WIDTH) if is_text[name] else longest
    return total
