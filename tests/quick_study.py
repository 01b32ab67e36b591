"""What tests of studies ask of a study's folder: the text of an answer, and the same study with other rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.report.parts import Text
from stepscope.studies.stored import Stored


def first_text(answer: Callable[[Stored], Any], stored: Stored) -> str:
    """The first text of an answer; nothing after it is computed."""
    return next(part.text for part in answer(stored) if isinstance(part, Text))


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
