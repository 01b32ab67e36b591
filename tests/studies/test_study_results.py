"""The studies that were run on a GPU, as docs/results keeps them: their rows can be read and answered from."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.document.model import Missing, Text
from stepscope.studies.build import report_of_study
from stepscope.studies.stored import Stored
from stepscope.studies.write import study_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/study-*/study.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_is_kept_is_whole_and_answers_as_far_as_it_goes(folder):
    study, stored = study_of(folder), Stored(folder)
    report = report_of_study(study, stored)

    missing = [part.text for part in report.parts(Missing)]
    assert all("is not here" in text for text in missing), missing  # recordings and traces are not kept
    answered = [section for section in report.sections[1:-1] if any(isinstance(p, Text) for p in section.parts)]
    kept = (folder / "report" / "report.md").read_text()
    assert answered and all(section.title in kept for section in report.sections)
    assert "Not measured" not in kept and "Not answered" not in kept
    assert all((folder / measure.id / "results.jsonl").is_file() for measure in study.measures)
    assert not [path for path in folder.rglob("*") if path.stat().st_size > 1 << 20]
