"""Publish a study in docs/results: its rows, and a report in Markdown with its charts.

    python scripts/publish_study.py runs/nano docs/results/h200/study-nano   # from a study's folder
    python scripts/publish_study.py docs/results/h200/study-nano             # the report again, from its rows

Recordings, traces and the page are too large to publish. Tables made from them are in kept_tables.json, so that
`stepscope report` of the published folder has every answer. Charts made from them stay as they are. Paths of the
machine it ran on are cut to those inside the project.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from stepscope.document.model import Chart, Document, Lines, Missing, Table
from stepscope.errors import Unavailable
from stepscope.render.markdown.markdown import markdown_of
from stepscope.render.png.pictures import png_of
from stepscope.studies.report import report_of_study
from stepscope.studies.stored import KEPT_FILE, STUDY_FILE, Stored
from stepscope.studies.study import Drawn, Study, TableOf
from stepscope.studies.write import REPORT_FOLDER, study_of

ROWS = ("results.jsonl", "sweep.json")
OUTSIDE = re.compile(r"[^\s\"'(`]*?(?=\b(?:src/(?:stepscope/|…)|site-packages/))")
TABLE_LINK = re.compile(r"^(all\b.*?|(.+?)) in \[tables/.*$\n?", re.M)
"""Says that all rows, or how many more, are in a CSV file, which is not published."""


def publish(folder: Path, target: Path) -> None:
    """Write the rows, the kept tables, the report and its charts into `target`."""
    study, is_new = study_of(folder), folder != target
    if is_new:
        shutil.rmtree(target, ignore_errors=True)
        places = [Path(measure.id) / name for measure in study.measures for name in ROWS]
        for path in (place for place in (Path(STUDY_FILE), *places) if (folder / place).is_file()):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(_without_paths(folder / path), encoding="utf-8")
        kept = _only_from_recordings(study, Stored(folder), Stored(target))
        (target / KEPT_FILE).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    charts = target / REPORT_FOLDER / "charts"
    report = report_of_study(study, Stored(folder if is_new else target))
    shown = report if is_new else _with_charts(study, report, charts)
    charts.mkdir(parents=True, exist_ok=True)
    for chart in report.parts(Chart):
        (charts / f"{chart.id}.png").write_bytes(png_of(chart))
    text = TABLE_LINK.sub(lambda found: f"{found[2]}\n" if found[2] else "", markdown_of(shown, in_folder=True))
    (target / REPORT_FOLDER / "report.md").write_text(OUTSIDE.sub("", text), encoding="utf-8")


def _only_from_recordings(study: Study, whole: Stored, bare: Stored) -> dict[str, dict[str, list[object]]]:
    """Return the columns of the tables that the rows alone do not give."""
    kept: dict[str, dict[str, list[object]]] = {}
    for table in (part for question in study.questions for part in question.parts if isinstance(part, TableOf)):
        try:
            bare.rows(table)
        except Unavailable:
            shown = [part for part in report_of_study(study, whole).parts(Table) if part.id == table.id]
            for each in shown:
                kept[table.id] = {name: list(values) for name, values in each.columns.items()}
    return kept


def _with_charts(study: Study, report: Document, charts: Path) -> Document:
    """Return the report with the published charts in the place of what says that they cannot be drawn."""
    drawn = {
        question.id: [part for part in question.parts if isinstance(part, Drawn)] for question in study.questions
    }
    sections = []
    for section in report.sections:
        there = {part.id for part in section.parts if isinstance(part, Chart)}
        old = [
            each
            for each in drawn.get(section.id, ())
            if each.id not in there and (charts / f"{each.id}.png").is_file()
        ]
        parts = [part for part in section.parts if not (old and isinstance(part, Missing))]
        parts[1:1] = [Lines(id=each.id, title=each.title, x="x", y="y", series=()) for each in old]
        sections.append(replace(section, parts=tuple(parts)))
    return replace(report, sections=tuple(sections))


def _without_paths(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.name == "sweep.json":
        facts = json.loads(text)
        facts.pop("working_folder", None)
        text = json.dumps(facts, indent=1) + "\n"
    return OUTSIDE.sub("", text)


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[-1]))
