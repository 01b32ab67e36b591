"""What every study promises, checked on its quick run: imported by the file of each study."""

from __future__ import annotations

from quick_study import canned
from stepscope.document.model import Chart, Missing, Table, Text
from stepscope.studies.study import ChartOf, TableOf
from stepscope.studies.write import write_files


def check_report(study, report, unanswered=(), missing=()):
    """Every question has its sentence, its charts and its tables; no table has an empty column."""
    sections = list(zip(study.questions, report.sections[1:-1]))
    without = [question.title for question, section in sections if not isinstance(section.parts[0], Text)]
    assert without == list(unanswered)
    for question, section in sections:
        needed = [part for part in question.parts if question.title not in unanswered]
        tables = {part.id for part in needed if isinstance(part, TableOf) and not part.is_optional}
        charts = {part.id for part in needed if isinstance(part, ChartOf)}
        assert tables - set(missing) <= {part.id for part in section.parts if isinstance(part, Table)}
        assert charts <= {part.id for part in section.parts if isinstance(part, Chart)}
        assert not question.sentence or section.parts[0].text.count(". ") == 0, "one sentence"
    for found in report.parts(Table):
        empty = [name for name, values in found.columns.items() if all(value in (None, "") for value in values)]
        assert found.num_rows and not empty, (found.id, empty)
    ids = [part.id for part in report.parts(Table)]
    assert len(ids) == len(set(ids))
    assert all("Not answered" not in part.text for part in report.parts(Missing)), report.parts(Missing)


def check_files(study, report, stored):
    """Every further file that the study declares is written, and says something."""
    write_files(study, report, stored)
    for name in study.files:
        place = stored.folder / name
        files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
        assert files and all(path.stat().st_size > 50 for path in files), name
        if name.endswith(".png"):
            assert place.read_bytes().startswith(b"\x89PNG")


def check_follows(study, stored, target, fixed=()):
    """No sentence is canned: each is another when every figure is another."""
    assert canned(study, stored, target) == list(fixed)
