"""Conditions of `--when` and sizes of windows: when they are true, and which are refused."""

from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.errors import UsageError
from stepscope.recorder.history import requests
from stepscope.recorder.history.conditions import State, Watch, limit_of, parse
from verbs import run_verb


def test_when_conditions_are_true() -> None:
    second = 10**9
    watch = Watch(parse("step_time > 1.5x"), 2, State(0, 0))
    times = [(None, None), (100, 100), (160, 100), (170, 100), (90, 100), (151, 100), (90, 100), (200, 100)]
    assert [watch.fires(State(0, 0, *each)) for each in times] == [
        *(False, False, True, False, False, True, False, False)  # once each time, twice in all
    ]
    assert Watch(parse("step_time > 2s"), 1, State(0, 0)).fires(State(0, 0, step_ns=2 * second + 1))
    assert not Watch(parse("step_time > 2s"), 1, State(0, 0)).fires(State(0, 0, step_ns=2 * second))
    memory = Watch(parse("memory > 90%"), 1, State(0, 0))
    assert not memory.fires(State(0, 0, memory_bytes=90, total_bytes=100))
    assert memory.fires(State(0, 0, memory_bytes=91, total_bytes=100))
    assert Watch(parse("memory > 1GiB"), 1, State(0, 0)).fires(State(0, 0, memory_bytes=2**30 + 1))
    every = Watch(parse("every 2h"), 5, State(0, 0))
    assert [every.fires(State(hours * 3600 * second, 0)) for hours in (1, 2, 3, 4, 5)] == [
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "text", ["", "step_time", "loss > 3", "step_time > 0x", "every 2x", "memory > 3s", "memory > 900%", "every h"]
)
def test_conditions_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the condition"):
        parse(text)


@pytest.mark.parametrize("text", ["every 1.5 steps", "step_time > 0.5x", "step_time > 1x"])
def test_conditions_that_are_read_but_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse(text)
    assert parse("every 2.0 steps").value == 2 and parse("step_time > 1.1x").value == 1.1


def test_a_limit_is_that_of_a_condition(tmp_path: Path) -> None:
    assert limit_of(None, []) == limit_of(None, ["every 2h"]) == 3 and limit_of(7, ["every 2h"]) == 7
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    for words in (("trigger", tmp_path, "--limit", 2), ("run", "--limit", 2, script), ("run", "--limit", 0, script)):
        done = run_verb(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "--limit" in done.stderr


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"trace": -1}, "trace is -1"),
        ({"trace": requests.MOST_TRACED + 1}, "trace is 201"),
        ({"trace": 0, "clean": 0}, "the window would be empty"),
        ({"trace": 0, "stacks": True}, "stacks are part of a trace"),
        ({"when": "never"}, "cannot read the condition"),
        ({"when": "every 2h", "limit": 0}, "limit is 0"),
    ],
)
def test_windows_that_cannot_be_asked_for(tmp_path: Path, wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        stepscope.trigger(tmp_path, **wanted)
