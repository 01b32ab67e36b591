"""What tests of studies ask of a study's folder: the text of an answer, and the same study with other rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.document.model import Missing, Table, Text
from stepscope.studies.report import answer_of
from stepscope.studies.stored import Stored
from stepscope.studies.study import Question, Study


def first_text(question: Question, stored: Stored) -> str:
    """The sentence of an answer, or why there is none."""
    return next(part.text for part in answer_of(question, stored) if isinstance(part, (Missing, Text)))


def table_of(question: Question, stored: Stored, id: str) -> Mapping[str, Sequence[Any]]:
    """The columns of a table of an answer."""
    return next(part.columns for part in answer_of(question, stored) if isinstance(part, Table) and part.id == id)


def changed(studied: Path, target: Path, measure: str, change: Callable[[dict[str, Any]], None]) -> Stored:
    """A copy of the study in which each row of a measure was changed in place."""
    copy = shutil.copytree(studied, target)
    change_lines(copy / measure / "results.jsonl", change)
    return Stored(copy)


def change_lines(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each line of JSON in place."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def canned(study: Study, stored: Stored, target: Path) -> list[str]:
    """The questions whose answers, word for word, are the same when every figure is another."""
    other = _disturbed(stored.folder, target)
    told = {question.title: [first_text(question, each) for each in (stored, other)] for question in study.questions}
    return [title for title, (before, after) in told.items() if before == after]


def _disturbed(studied: Path, target: Path) -> Stored:
    """A copy of the study in which no figure is as it was: rows scaled, each otherwise, recordings swapped."""
    copy = shutil.copytree(studied, target)
    for path in copy.glob("*/results.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{name: row.get(name) for name in ("recording", "trace")} for row in rows]
        for place, row in enumerate(rows):
            row |= {name: _scaled(row[name], 2 + place) for name in row.keys() & _FIGURES}
            row |= {name: value for name, value in kept[place - 1].items() if value is not None}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in copy.glob("*/recordings/*/samples.jsonl"):
        change_lines(path, lambda line: line.update({name: _scaled(line[name], 2) for name in line.keys() & _TIMES}))
    return Stored(copy)


_TIMES = {"wall_ns", "host_ns"}
_FIGURES = {
    "samples_device_ns", "samples_host_ns", "samples_phase_ns", "first_call_ns", "traced_ns", "layers", "loss",
    "peak_allocated_bytes", "before_backward_bytes", "facts",
}  # fmt: skip


def _scaled(value: Any, factor: int) -> Any:
    if isinstance(value, dict):
        return {name: _scaled(each, factor) for name, each in value.items()}
    if isinstance(value, list):
        return [_scaled(each, factor) for each in value]
    return value * factor if isinstance(value, (int, float)) else value
