"""A study's report and the files that it promises, written into its folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from stepscope.errors import RecordingError, TraceError, Unavailable, UsageError
from stepscope.render.files import need, write_texts, writing
from stepscope.render.markdown.markdown import markdown_of
from stepscope.render.write import write_report
from stepscope.studies.build import report_of_study
from stepscope.studies.registry import STUDIES, find_study
from stepscope.studies.stored import TOML_FILE, Stored, read_facts
from stepscope.studies.study import REPORT, Study
from stepscope.studies.toml_study import study_from_toml

REPORT_FOLDER = "report"


def write_study(study: Study, folder: Path) -> Path:
    """Make the report and the files from what is stored; the page to look at first."""
    for package in ("plotly", "matplotlib"):
        need(package)
    stored = Stored(folder)
    report = report_of_study(study, stored)
    for name, content in study.files.items():
        try:
            made = markdown_of(report) if content is REPORT else content(stored)
        except (Unavailable, RecordingError, TraceError):
            continue  # the report says what was not measured
        several = made if isinstance(made, Mapping) else {"": made}
        for inner, text in several.items():
            target = folder / name / inner
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
            write_texts(target, [text])
    for inner in ("tables", "charts"):  # of a report made before there may be more
        shutil.rmtree(folder / REPORT_FOLDER / inner, ignore_errors=True)
    return write_report(report, folder / REPORT_FOLDER)


def study_of(folder: Path) -> Study:
    """The study that a folder is of. What somebody declared in Python is not run for a report of their folder."""
    facts = read_facts(folder)
    name = str(facts["study"])
    if name in STUDIES:
        return find_study(name)
    if (folder / TOML_FILE).is_file():
        return study_from_toml(folder / TOML_FILE, Path(name).stem)
    options = f"--{facts.get('mode')} --device {facts.get('device')} -o {folder} --resume"
    raise UsageError(f"{folder} is of a study of your own: stepscope study {Path(name).name} {options}")
