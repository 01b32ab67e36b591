"""The search for the largest value: exact on pretended predictions, with few of them, and bounded by a program."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("torch")

from stepscope.cli.main import main
from stepscope.errors import UsageError
from stepscope.planner import dataless_steps
from stepscope.planner.plan import Search
from stepscope.planner.prediction import FITS, GROWS, NOT_KNOWN, TOO_LARGE
from stepscope.sweep.tuning.max_batch import HIGHEST, largest

ROOM = 10**10
SHAPES = {
    "linear": lambda value: 10**8 + value * 10**6,
    "quadratic": lambda value: 10**8 + value * 10**5 + value * value * 300,
    "flat at first": lambda value: max(3 * 10**9, 10**9 + value * 10**7),
    "in jumps": lambda value: 10**8 + (value * 10**6 + 10**8) // 2**21 * 2**21,
}


def pretended(need, limit=None, fits=None, flops=10**12):
    """What is predicted for any value, and the list of values that were asked for."""
    asked = []

    def predict(value):
        asked.append(value)
        if limit is not None and value > limit:
            raise UsageError(f"at most {limit}")
        taken = need(value)
        verdict = fits or (FITS if taken * 1.05 <= ROOM else TOO_LARGE)
        return SimpleNamespace(
            flops=flops * value,
            live_at_peak={"activation": taken},
            peak_allocated_bytes=taken,
            fits=verdict,
            usable_bytes=ROOM,
        )

    return predict, asked


@pytest.mark.parametrize("start", [1, 4, 128, 30_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_exact_and_asks_for_no_value_twice(shape, start):
    need = SHAPES[shape]
    predict, asked = pretended(need)

    value, why = Search("batch", predict).run(start)

    assert need(value) * 1.05 <= ROOM < need(value + 1) * 1.05 and why is None
    assert len(asked) == len(set(asked)) <= 25


def test_long_sequences_take_few_predictions():
    predict, asked = pretended(SHAPES["quadratic"])
    value, _ = Search("seq_len", predict).run(128)
    doubled = []
    assert value == largest(lambda number: bool(doubled.append(number) or number <= value), 128)

    assert len(asked) < 0.8 * len(doubled)


def test_nothing_fits():
    predict, asked = pretended(lambda value: 2 * ROOM + value)

    assert Search("batch", predict).run(8) == (0, None)
    assert asked[-1] == 1 and len(asked) <= 5


@pytest.mark.parametrize("limit", [5, 300, 1000])
def test_a_limit_of_the_program_ends_the_search(limit):
    predict, _ = pretended(SHAPES["linear"], limit=limit)

    assert Search("seq_len", predict).run(4) == (limit, f"seq_len={limit + 1} cannot be planned: at most {limit}")


PROGRAM = """
import torch
from torch import nn

def table(batch: int = 8):
    positions, model = torch.randn(100, 64), nn.Linear(64, 64)

    def step():
        (model(torch.randn(batch, 64, device="cuda")) + positions[:batch]).sum().backward()

    return step

def looks(batch: int = 8):
    model = nn.Linear(64, 64)

    def step():
        rows = torch.arange(batch * 1000, device="cuda")
        model(torch.randn(batch, 64, device="cuda") + rows[rows > 9].sum()).sum().backward()

    return step
"""


@pytest.fixture
def search(tmp_path, capsys):
    """The largest batch of a program, and what bounds it or what went wrong."""
    (tmp_path / "programs.py").write_text(PROGRAM)

    def run(function):
        main(["plan", f"{tmp_path}/programs.py:{function}", "--max-batch", "--device", "NVIDIA L4", "--json"])
        out, error = capsys.readouterr()
        if not out:
            return None, error
        row = json.loads(out)
        return row["max_batch"], row["bounded_by"]["max_batch"]

    return run


@pytest.mark.long
def test_an_op_that_refuses_a_size_is_a_limit_of_the_program(search):
    value, why = search("table")

    assert value == 100 and why.startswith("batch=101 cannot be planned: ")
    assert "programs.py, line 9: RuntimeError: " in why and "101" in why


def test_what_the_plan_cannot_do_is_an_error_and_no_limit(search):
    value, why = search("looks")

    assert value is None and re.search(r"batch=\d+: .*a size that depends on values", why)


def test_a_fault_of_the_plan_is_an_error_and_no_limit(search, monkeypatch):
    faulty = [mock.DEFAULT, mock.DEFAULT, RuntimeError("a stack is empty")]
    monkeypatch.setattr(dataless_steps, "_until", mock.Mock(wraps=dataless_steps._until, side_effect=faulty))
    value, why = search("table")

    assert value is None and re.search(r"batch=32: .*RuntimeError: a stack is empty", why)


def test_a_limit_beyond_the_memory_does_not():
    predict, asked = pretended(SHAPES["linear"], limit=9600)
    value, why = Search("seq_len", predict).run(4)

    assert max(asked) > 0 and why is None
    assert SHAPES["linear"](value + 1) * 1.05 > ROOM


def test_what_changes_nothing_has_no_largest():
    predict, asked = pretended(lambda value: 1000, flops=0)

    assert Search("batch", predict).run(4) == (None, "batch does not change the memory of a step")
    assert len(asked) == 5


def test_what_grows_has_no_largest():
    predict, asked = pretended(SHAPES["linear"], fits=GROWS)

    assert Search("batch", predict).run(4) == (None, "memory grows with every step, so no value fits for long")
    assert asked == [4]


def test_what_is_not_known_has_no_largest():
    predict, asked = pretended(SHAPES["linear"], fits=NOT_KNOWN)
    value, why = Search("batch", predict).run(4)

    assert value is None and "an optimizer never stepped" in why
    assert asked == [4]


def test_a_search_ends_somewhere():
    predict, asked = pretended(lambda value: 1000 + value)

    assert Search("batch", predict).run(4) == (HIGHEST, "no larger value was tried")
    assert len(asked) < 40


@pytest.mark.parametrize("stride", [None, 1, 7])
@pytest.mark.parametrize("start", [1, 5, 64, 1000])
def test_any_stride_finds_the_same(start, stride):
    for wanted in (0, 1, 2, 63, 64, 65, 500):
        assert largest(lambda number, wanted=wanted: number <= wanted, start, stride) == wanted
