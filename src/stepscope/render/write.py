"""Writes a report to files; the suffix of the target chooses the format (for JSON, see docs/report.md)."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from stepscope.document.model import Chart, Document, Findings, Part, Table, Timeline
from stepscope.errors import UsageError
from stepscope.render.files import check_file, check_folder, file_names, has, need, write_texts, writing

PAGE, MARKDOWN, JSON = ".html", ".md", ".json"
_FILES = (PAGE, MARKDOWN, JSON)
SCHEMA_VERSION = 1
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    """Write every format; without matplotlib, charts are on the page and drawn as text in the Markdown."""
    from stepscope.render.csv import csv_of
    from stepscope.render.png.pictures import png_of

    draws = has("matplotlib")
    with writing(target):
        for folder in (target, target / "tables", *([target / "charts"] if draws else [])):
            folder.mkdir(exist_ok=True)
    for suffix in _FILES:
        write_texts(target / f"report{suffix}", [_as_text(report, suffix, in_folder=draws)])
    tables, charts = report.parts(Table), report.parts(Chart) if draws else []
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
    return json.dumps(plain_of(report), allow_nan=False) + "\n"


def plain_of(report: Document) -> dict[str, Any]:
    """Return the report as JSON values; NaN and infinity become null."""
    return {"schema_version": SCHEMA_VERSION, **_fields(report)}


def _part(part: Part) -> dict[str, Any]:
    kind = type(part).__name__.lower()
    if isinstance(part, Findings):
        return {"kind": kind, "diagnosis": _plain(part.values)}
    if isinstance(part, Timeline):
        return {"kind": kind, "text": "only on the page; stepscope export writes its events"}
    if isinstance(part, Table):
        return {"kind": kind, **_fields(part), "num_rows": part.num_rows}
    return {"kind": kind, "is_chart": isinstance(part, Chart), **_fields(part)}


def _fields(value: Any) -> dict[str, Any]:
    return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)  # JSON readers reject surrogates
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return _part(value) if isinstance(value, Part) else _fields(value)
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(one) for key, one in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(one) for one in value]
    return _plain(str(value))
