"""Rows that were edited or damaged: one sentence from every verb that reads them, or a right answer; no traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.document.comparison import comparison_document
from stepscope.document.sections.sweep import sweep_report
from stepscope.errors import StepscopeError
from stepscope.render.terminal import terminal_text
from stepscope.render.write import plain_of
from stepscope.session import open_session
from stepscope.session.compare import compare, open_sides

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200"
NASTY = [
    None, True, -1, 0, 0.5, 1e308, -1e308, 10**400, 2**64, "", "x", "\ud800", "\x1b[2J",
    "../../../../etc/passwd", "/dev/zero",
    [], [None], [[]], ["x"], [0], [-1], [1e308], {}, {"x": "y"}, {"x": [{}]}, {"": None}, [[[[[[[[[[[[[1]]]]]]]]]]]]],
]  # fmt: skip


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Every place in a value that can be replaced."""
    yield path
    inner = (
        value.items() if isinstance(value, dict) else list(enumerate(value))[:2] if isinstance(value, list) else ()
    )
    for key, each in inner:
        yield from places(each, (*path, key))


def with_value(row: dict, path: tuple, value: object) -> dict:
    changed = copy.deepcopy(row)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Two rows that between them have most fields."""
    found = [json.loads(line) for file in RESULTS.rglob("results.jsonl") for line in file.read_text().splitlines()]
    found.sort(key=lambda row: -len(row))
    extra = {"oom": {"asked_bytes": 1, "free_bytes": 1, "total_bytes": 2}, "tries": [{"batch": 1, "status": "ok"}]}
    first = {**found[0], **extra, "max_batch": 4, "attempts": 2, "killed": False, "refused": ["x"]}
    return [first, {**first, "hash": "other", "config": {**first["config"], "batch": 9}}]


def answers(folder: Path, whole: Path) -> str:
    """Everything that is shown of a sweep, and of its comparison with another."""
    report = sweep_report(open_session(folder, use_cache=False).sweep)
    json.dumps(plain_of(report), allow_nan=False)
    compared = compare(*open_sides([whole], [folder], False, None), 0.02, (), [])
    json.dumps(compared.to_json(), allow_nan=False)
    return terminal_text(report, 100, False) + terminal_text(comparison_document(compared), 100, False)


def write(folder: Path, rows: list[dict], environments: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sweep.json").write_text(json.dumps({"schema_version": 1, "environments": environments}))
    return folder


@pytest.mark.parametrize("num", [60, pytest.param(100_000, marks=pytest.mark.long)])
def test_no_value_anywhere_in_a_row_is_a_traceback(rows, tmp_path, num):
    environments = {rows[0]["environment_hash"]: {"device_name": "NVIDIA H200", "torch": "2.9", "threads": 1}}
    whole = write(tmp_path / "whole", rows, environments)
    assert "NVIDIA H200" in answers(whole, whole)
    chosen = random.Random(7)
    every = [path for path in places(rows[0]) if path]
    cases = [(path, value) for path in every for value in NASTY]
    chosen.shuffle(cases)
    broken, num_refused = [], 0
    for path, value in cases[:num]:
        folder = write(tmp_path / "damaged", [with_value(rows[0], path, value), rows[1]], environments)
        try:
            answers(folder, whole)
        except StepscopeError as error:
            num_refused += 1
            assert "\n" not in str(error)
        except Exception as error:
            broken.append((path, value, repr(error)[:200]))
    assert not broken, broken[:20]
    assert num_refused > len(cases[:num]) / 3
