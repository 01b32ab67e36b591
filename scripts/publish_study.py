"""Copy what is small of a study into docs/results: rows, report, tables, pictures; no page, trace, recording or log.

    python scripts/publish_study.py runs/nano docs/results/h200/study-nano

Paths of the machine it ran on are cut to those inside the project. What a copy no longer has, its report says is not
here; the report itself was made with all of it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from stepscope.studies.stored import STUDY_FILE
from stepscope.studies.write import REPORT_FOLDER, study_of

ROWS = ("results.jsonl", "results.csv", "results.md", "sweep.json")
# What is large, or says the same again.
LEFT_OUT = ("traces", "report.html", "report.json")
TEXTS = (".jsonl", ".json", ".csv", ".md", ".txt")
OUTSIDE = re.compile(r"[^\s\"'(`]*?(?=\b(?:src/(?:stepscope/|…)|site-packages/))")


def publish(folder: Path, target: Path) -> None:
    """The small files of `folder`, in the same places under `target`, which is made anew."""
    shutil.rmtree(target, ignore_errors=True)
    for path in _files(folder):
        to = target / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in TEXTS:
            to.write_text(_without_paths(path), encoding="utf-8")
        else:
            shutil.copyfile(path, to)


def _files(folder: Path) -> list[Path]:
    study = study_of(folder)
    places = [folder / STUDY_FILE, folder / REPORT_FOLDER, *(folder / name for name in study.files)]
    places += [folder / measure.id / name for measure in study.measures for name in ROWS]
    found = {file for place in places for file in ([place] if place.is_file() else place.rglob("*"))}
    return sorted(
        file for file in found if file.is_file() and not set(LEFT_OUT) & set(file.relative_to(folder).parts)
    )


def _without_paths(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.name == "sweep.json":
        facts = json.loads(text)
        facts.pop("working_folder", None)
        text = json.dumps(facts, indent=1) + "\n"
    return OUTSIDE.sub("", text)


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[2]))
