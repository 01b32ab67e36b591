"""A report as files: the ending of the target says which."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from stepscope.errors import MissingDependencyError, UsageError
from stepscope.report.parts import Chart, Report, Table

PAGE, MARKDOWN, JSON = ".html", ".md", ".json"
_FILES = (PAGE, MARKDOWN, JSON)


def check_target(target: Path, force: bool) -> Path:
    """The target, where it can be written; UsageError before any work is done for nothing."""
    if target.suffix and target.suffix not in _FILES and not target.is_dir():
        raise UsageError(f"{target}: a report is .html, .md, .json or a folder")
    if target.suffix in _FILES and target.is_dir():
        raise UsageError(f"{target} is a folder: name a file, or a folder without that ending")
    if target.is_file() and not force:
        raise UsageError(f"{target} is there already: --force writes over it")
    if target.is_file() and target.suffix not in _FILES:
        raise UsageError(f"{target} is a file: a report is .html, .md, .json or a folder")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise UsageError(f"{target} is a folder with files in it: --force writes into it")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}")
    needed = {PAGE: ("plotly",), MARKDOWN: (), JSON: ()}.get(target.suffix, ("plotly", "matplotlib"))
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(f"{name} is missing: pip install {name}")
    return target


def write_report(report: Report, target: Path) -> Path:
    """Write it, and say which file to look at first."""
    try:
        if target.suffix in _FILES:
            _write(target, _as_text(report, target.suffix))
            return target
        return _write_folder(report, target)
    except OSError as error:
        raise UsageError(f"{target} could not be written: {error.strerror or error}") from None


def _write_folder(report: Report, target: Path) -> Path:
    from stepscope.report.csv_tables import csv_of
    from stepscope.report.pictures.pictures import png_of

    for folder in (target, target / "tables", target / "charts"):
        folder.mkdir(exist_ok=True)
    for suffix in _FILES:
        _write(target / f"report{suffix}", _as_text(report, suffix, in_folder=True))
    tables, charts = report.parts(Table), report.parts(Chart)
    for table, name in zip(tables, file_names([table.id for table in tables])):
        _write(target / "tables" / f"{name}.csv", csv_of(table))
    for chart, name in zip(charts, file_names([chart.id for chart in charts])):
        _write(target / "charts" / f"{name}.png", png_of(chart))
    return target / f"report{PAGE}"


def file_names(ids: list[str]) -> list[str]:
    """A file's name for each: two of one id are numbered."""
    return [f"{name}-{ids[:at].count(name) + 1}" if name in ids[:at] else name for at, name in enumerate(ids)]


def _write(path: Path, content: str | bytes) -> None:
    """Whole or not at all."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    beside = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _as_text(report: Report, suffix: str, in_folder: bool = False) -> str:
    if suffix == PAGE:
        from stepscope.report.page.page import page_of

        return page_of(report)
    if suffix == MARKDOWN:
        from stepscope.report.markdown.markdown import markdown_of

        return markdown_of(report, in_folder)
    from stepscope.report.plain import plain_of

    return json.dumps(plain_of(report), allow_nan=False) + "\n"
