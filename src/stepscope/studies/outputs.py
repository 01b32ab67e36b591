"""Contents of the files a study promises besides its report. What draws is imported late: measuring needs none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Chart, Report, Section, Table
from stepscope.studies.stored import Stored

Part = TypeVar("Part")
Content = Callable[[Stored], str | bytes]


def part(answer: Callable[[Stored], Iterable[Any]], kind: type[Part], id: str) -> Callable[[Stored], Part]:
    """The table or chart of that id among the parts of an answer."""

    def find(stored: Stored) -> Part:
        for found in answer(stored):
            if isinstance(found, kind) and getattr(found, "id", None) == id:
                return found
        raise CannotCheck(f"there is no {id}")

    return find


def png(chart: Callable[[Stored], Chart]) -> Content:
    """A chart as a picture."""

    def content(stored: Stored) -> bytes:
        from stepscope.report.pictures.pictures import png_of

        return png_of(chart(stored))

    return content


def csv(table: Callable[[Stored], Table]) -> Content:
    """A table as CSV."""

    def content(stored: Stored) -> str:
        from stepscope.report.csv_tables import csv_of

        return csv_of(table(stored))

    return content


def markdown(table: Callable[[Stored], Table]) -> Content:
    """A table as Markdown."""

    def content(stored: Stored) -> str:
        from stepscope.report.markdown.markdown import markdown_of

        found = table(stored)
        return markdown_of(Report(found.title, "", (Section(found.id, found.title, (found,)),)))

    return content


def rows_json(measure: str) -> Content:
    """Every row of a measure."""
    return lambda stored: json.dumps(list(stored.rows(measure).needed()), indent=1, allow_nan=False) + "\n"
