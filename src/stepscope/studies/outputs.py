"""Contents of the files a study promises besides its report. What draws is imported late: measuring needs none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from stepscope.document.model import Chart, Report, Section, Table
from stepscope.errors import Unavailable, UsageError
from stepscope.studies.stored import Stored

Part = TypeVar("Part")
Content = Callable[[Stored], str | bytes]


def part(answer: Callable[[Stored], Iterable[Any]], kind: type[Part], id: str) -> Callable[[Stored], Part]:
    """The table or chart of that id among the parts of an answer."""

    def find(stored: Stored) -> Part:
        for found in stored.parts(answer):
            if isinstance(found, kind) and getattr(found, "id", None) == id:
                return found
        raise Unavailable(f"there is no {id}")

    return find


def png(chart: Callable[[Stored], Chart]) -> Content:
    """A chart as a picture."""

    def content(stored: Stored) -> bytes:
        from stepscope.render.png.pictures import png_of

        return png_of(chart(stored))

    return content


def csv(table: Callable[[Stored], Table]) -> Content:
    """A table as CSV."""

    def content(stored: Stored) -> str:
        from stepscope.render.csv import csv_of

        return csv_of(table(stored))

    return content


def markdown(table: Callable[[Stored], Table]) -> Content:
    """A table as Markdown."""

    def content(stored: Stored) -> str:
        from stepscope.render.markdown.markdown import markdown_of

        found = table(stored)
        return markdown_of(Report(found.title, "", (Section(found.id, found.title, (found,)),)))

    return content


def appended(name: str, table: Callable[[Stored], Table]) -> Content:
    """A table as CSV under what the file of that name already has: lines are added, none is ever taken away."""

    def content(stored: Stored) -> str:
        from stepscope.render.csv import csv_of

        path = stored.folder / name
        header, *lines = csv_of(table(stored)).splitlines()
        kept = (path.read_text(encoding="utf-8").splitlines() if path.is_file() else []) or [header]
        if kept[:1] != [header]:
            raise UsageError(f"{path} has other columns than {header}: move it away")
        known = Counter(kept)
        for line in lines:  # two rows that are alike, as two that ran out of memory, are two lines
            if known[line] > 0:
                known[line] -= 1
            else:
                kept.append(line)
        return "\n".join(kept) + "\n"

    return content


def rows_json(measure: str) -> Content:
    """Every row of a measure."""
    return lambda stored: json.dumps(list(stored.rows(measure).needed()), indent=1, allow_nan=False) + "\n"
