"""A card of a recording in which one value is nonsense: a card or one RecordingError, never a traceback."""

from __future__ import annotations

import copy
import json

import pytest
from test_card import COMPILER

from handmade import flops_facts, gpu_facts, sample, write_recording
from stepscope import read
from stepscope.analysis.time import statistics
from stepscope.document.card import Card
from stepscope.errors import RecordingError

pytestmark = pytest.mark.long

NONSENSE = (None, "text", [], {}, -1, 0)
WINDOWS = ("warmup", "clean", "clean", "trace", "memory")
WHOLE = {
    "recording.json": gpu_facts(notes=[{"about": "a", "text": "b"}]) | {"flops": flops_facts()},
    "samples.jsonl": [sample(i, window, device_ns={"forward": 10}, loss=1.0) for i, window in enumerate(WINDOWS)],
    "counters.jsonl": [{"t_ns": 15_000_000, "gpu_busy_share": 0.5, "power_watts": 5.0, "throttle": ["heat"]}],
    "compile.json": COMPILER,
}


def paths(value: object, path: tuple = ()) -> list[tuple]:
    """The way to every value inside a nested one."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [deeper for key, item in items for deeper in paths(item, (*path, key))]


def replaced(value: object, path: tuple, new: object) -> object:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


def card_of(folder, parts: dict) -> Card | None:
    write_recording(folder, *parts.values())
    try:
        card = read(folder)
        assert str(card) and card._repr_html_()
        json.dumps(card.to_json(), allow_nan=False, default=str)
        return card
    except RecordingError:
        return None


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 2)


def test_the_whole_recording_has_a_card(tmp_path):
    assert card_of(tmp_path / "run", WHOLE).summary.num_clean == 2


@pytest.mark.parametrize("file", WHOLE)
def test_one_wrong_value_anywhere_never_makes_a_traceback(tmp_path, file):
    failed: dict[str, list[str]] = {}
    for path in paths(WHOLE[file]):
        for new in NONSENSE:
            try:
                card_of(tmp_path / "run", WHOLE | {file: replaced(WHOLE[file], path, new)})
            except Exception as error:
                place = ".".join(map(str, path))
                failed.setdefault(f"{type(error).__name__}: {error}", []).append(f"{place} = {json.dumps(new)}")

    assert failed == {}, "\n".join(f"{error}: {', '.join(places)}" for error, places in failed.items())
