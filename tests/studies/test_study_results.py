"""The studies that were run on a GPU, as docs/results keeps them: every answer can be made from what is kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from stepscope.document.model import Missing, Text
from stepscope.studies.cs336.kernels import mixed_precision
from stepscope.studies.report import answer_of, report_of_study
from stepscope.studies.stored import Stored
from stepscope.studies.write import study_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/study-*/study.json"))


def test_rows_alone_answer_what_needs_no_trace(tmp_path):
    (results,) = (folder for folder in FOLDERS if folder.name == "study-cs336")
    shutil.copy(results / "study.json", tmp_path)
    shutil.copytree(results / "models", tmp_path / "models")
    text, *tables = answer_of(mixed_precision, Stored(tmp_path))

    assert isinstance(text, Text)
    assert [(table.id, table.num_rows) for table in tables] == [
        ("mixed-precision", 21), ("published-bf16-forward", 5), ("published-bf16-forward+backward", 3),
    ]  # fmt: skip
    assert [*tables[0].columns] == ["model", "pass", "fp32_median_ns", "autocast_median_ns", "speedup"]


@pytest.mark.long
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_is_kept_answers_every_question(folder):
    study, stored = study_of(folder), Stored(folder)
    report = report_of_study(study, stored)

    # Only charts that are drawn from a recording cannot be made again; the report shows them as published.
    missing = {part.text for part in report.parts(Missing)}
    assert all(re.fullmatch(r"Not measured: the recording \w+ is not here", text) for text in missing), missing
    assert all(isinstance(section.parts[0], Text) for section in report.sections[1:-1])
    kept = (folder / "report" / "report.md").read_text()
    assert all(section.title in kept for section in report.sections)
    assert "Not measured" not in kept and "Not answered" not in kept
    linked = set(re.findall(r"\(charts/(.+?\.png)\)", kept))
    assert linked == {path.name for path in (folder / "report" / "charts").iterdir()}
    assert all((folder / measure.id / "results.jsonl").is_file() for measure in study.measures)
    assert not [path for path in folder.rglob("*") if path.stat().st_size > 1 << 20]
