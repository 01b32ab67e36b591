"""Writes a study's report and its further files into its folder."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.document.model import Chart, Document, Section, Table
from stepscope.errors import RecordingError, TraceError, Unavailable, UsageError
from stepscope.render.files import has, need, write_texts, writing
from stepscope.render.markdown.markdown import markdown_of
from stepscope.render.write import write_report
from stepscope.studies.registry import STUDIES, find_study, study_from_toml
from stepscope.studies.report import report_of_study
from stepscope.studies.stored import TOML_FILE, Stored, read_facts
from stepscope.studies.study import REPORT, Study

REPORT_FOLDER = "report"


def write_study(study: Study, folder: Path) -> Path:
    """Write the report and the files from what is stored. Return the page to look at first.

    A study may have taken hours: without matplotlib, only the charts as PNG are left out.
    """
    need("plotly")
    stored = Stored(folder)
    report = report_of_study(study, stored)
    write_files(study, report, stored)
    report_folder = folder / REPORT_FOLDER
    old = {path: path.lstat().st_ino for inner in ("tables", "charts") for path in (report_folder / inner).glob("*")}
    page = write_report(report, report_folder)
    for path, inode in old.items():  # an earlier report may have had more; one that was replaced is another file
        if path.lstat().st_ino == inode:
            path.unlink()
    return page


def without_pictures(folder: Path) -> str:
    """Return what to do for the charts as PNG of a study; empty if they were written."""
    if has("matplotlib"):
        return ""
    again = f"stepscope report {shlex.quote(str(folder))}"
    return f" (without charts as PNG: for them, pip install 'stepscope[png]' && {again})"


def write_files(study: Study, report: Document, stored: Stored) -> None:
    """Write the further files that a study declares. What was not measured is left out; the report says so."""
    for name, made in study.files.items():
        if name.endswith(".png") and not has("matplotlib"):
            continue
        try:
            content = _content(name, made, report, stored)
        except (Unavailable, RecordingError, TraceError):
            continue
        several = content if isinstance(content, Mapping) else {"": content}
        for inner, text in several.items():
            target = stored.folder / name / inner
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
            write_texts(target, [text])


def _content(name: str, made: Any, report: Document, stored: Stored) -> Any:
    """Return the content of a further file: the suffix says what `made` is the id of."""
    if made is REPORT:
        return markdown_of(report)
    if callable(made):
        return made(stored)
    if name.endswith(".json"):
        return json.dumps(list(stored.rows(made).needed()), indent=1, allow_nan=False) + "\n"
    kind = Chart if name.endswith(".png") else Table
    part = next((part for part in report.parts(kind) if part.id == made), None)
    if part is None:
        raise Unavailable(f"there is no {made}")
    if name.endswith(".png"):
        from stepscope.render.png.pictures import png_of

        return png_of(part)
    if name.endswith(".csv"):
        from stepscope.render.csv import csv_of

        return csv_of(part)
    return markdown_of(Document(part.title, "", (Section(part.id, part.title, (part,)),)))


def study_of(folder: Path) -> Study:
    """Return the study of a folder. A study declared in Python by a user is not run: UsageError says what to do."""
    facts = read_facts(folder)
    name = str(facts["study"])
    if name in STUDIES:
        return find_study(name)
    if (folder / TOML_FILE).is_file():
        return study_from_toml(folder / TOML_FILE, Path(name).stem)
    options = f"--{facts.get('mode')} --device {facts.get('device')} -o {folder} --resume"
    raise UsageError(
        f"{folder} holds a study of your own. Make its report with: stepscope study {Path(name).name} {options}"
    )
