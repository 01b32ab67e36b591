"""Writes a report to files; the suffix of the target chooses the format."""

from __future__ import annotations

import json
from pathlib import Path

from stepscope.document.model import Chart, Document, Table
from stepscope.errors import UsageError
from stepscope.render.files import check_file, check_folder, file_names, need, write_texts, writing

PAGE, MARKDOWN, JSON = ".html", ".md", ".json"
_FILES = (PAGE, MARKDOWN, JSON)


def check_target(target: Path, force: bool) -> Path:
    """Return the target if it can be written; raise UsageError before any work is done."""
    if target.suffix and target.suffix not in _FILES and not target.is_dir():
        raise UsageError(f"{target}: a report is a .html, .md or .json file, or a folder")
    (check_file if target.suffix in _FILES else check_folder)(target, force)
    needed = {PAGE: ("plotly",), MARKDOWN: (), JSON: ()}.get(target.suffix, ("plotly", "matplotlib"))
    for name in needed:
        need(name)
    return target


def write_report(report: Document, target: Path) -> Path:
    """Write the report and return the file to open first."""
    if target.suffix in _FILES:
        write_texts(target, [_as_text(report, target.suffix)])
        return target
    return _write_folder(report, target)


def write_sweep_tables(folder: Path, document: Document, records: Table) -> None:
    """Write results.md and results.csv beside the rows of a sweep."""
    from stepscope.render.csv import csv_of
    from stepscope.render.markdown.markdown import markdown_of

    write_texts(folder / "results.csv", [csv_of(records)])
    write_texts(folder / "results.md", [markdown_of(document)])


def _write_folder(report: Document, target: Path) -> Path:
    from stepscope.render.csv import csv_of
    from stepscope.render.png.pictures import png_of

    with writing(target):
        for folder in (target, target / "tables", target / "charts"):
            folder.mkdir(exist_ok=True)
    for suffix in _FILES:
        write_texts(target / f"report{suffix}", [_as_text(report, suffix, in_folder=True)])
    tables, charts = report.parts(Table), report.parts(Chart)
    for table, name in zip(tables, file_names([table.id for table in tables])):
        write_texts(target / "tables" / f"{name}.csv", [csv_of(table)])
    for chart, name in zip(charts, file_names([chart.id for chart in charts])):
        write_texts(target / "charts" / f"{name}.png", [png_of(chart)])
    return target / f"report{PAGE}"


def _as_text(report: Document, suffix: str, in_folder: bool = False) -> str:
    if suffix == PAGE:
        from stepscope.render.page.page import page_of

        return page_of(report)
    if suffix == MARKDOWN:
        from stepscope.render.markdown.markdown import markdown_of

        return markdown_of(report, in_folder)
    from stepscope.render.json_values import plain_of

    return json.dumps(plain_of(report), allow_nan=False) + "\n"
