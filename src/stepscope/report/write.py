"""A report as files: the ending of the target says which."""

from __future__ import annotations

import json
from pathlib import Path

from stepscope.errors import UsageError
from stepscope.report.parts import Chart, Report, Table

PAGE, MARKDOWN, JSON = ".html", ".md", ".json"


def check_target(target: Path, force: bool) -> Path:
    """The target, where it can be written; UsageError before any work is done for nothing."""
    if target.suffix and target.suffix not in (PAGE, MARKDOWN, JSON):
        raise UsageError(f"{target}: a report is .html, .md, .json or a folder")
    if target.is_file() and not force:
        raise UsageError(f"{target} is there already: --force writes over it")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise UsageError(f"{target} is a folder with files in it: --force writes into it")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}")
    return target


def write_report(report: Report, target: Path) -> Path:
    """Write it, and say which file to look at first."""
    if target.suffix in (PAGE, MARKDOWN, JSON):
        target.write_text(_as_text(report, target.suffix), encoding="utf-8")
        return target
    from stepscope.report.csv_tables import csv_of
    from stepscope.report.pictures import png_of

    for folder in (target, target / "tables", target / "charts"):
        folder.mkdir(exist_ok=True)
    for suffix in (PAGE, MARKDOWN, JSON):
        (target / f"report{suffix}").write_text(_as_text(report, suffix), encoding="utf-8")
    for table in report.parts(Table):
        (target / "tables" / f"{table.id}.csv").write_text(csv_of(table), encoding="utf-8")
    for chart in report.parts(Chart):
        (target / "charts" / f"{chart.id}.png").write_bytes(png_of(chart))
    return target / f"report{PAGE}"


def _as_text(report: Report, suffix: str) -> str:
    if suffix == PAGE:
        from stepscope.report.page.page import page_of

        return page_of(report)
    if suffix == MARKDOWN:
        from stepscope.report.markdown import markdown_of

        return markdown_of(report)
    from stepscope.report.plain import plain_of

    return json.dumps(plain_of(report), allow_nan=False, ensure_ascii=False) + "\n"
