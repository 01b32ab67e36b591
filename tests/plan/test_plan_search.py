"""The search for the largest value: exact on pretended predictions, with few of them, and bounded by a program."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from stepscope.errors import UsageError
from stepscope.plan.largest import Search
from stepscope.plan.prediction import FITS, GROWS, TOO_LARGE
from stepscope.sweep.search import HIGHEST, largest

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


def test_a_limit_beyond_the_memory_does_not():
    predict, asked = pretended(SHAPES["linear"], limit=9600)
    value, why = Search("seq_len", predict).run(4)

    assert max(asked) > 0 and why is None
    assert SHAPES["linear"](value + 1) * 1.05 > ROOM


def test_what_changes_nothing_has_no_largest():
    predict, asked = pretended(lambda value: 1000, flops=0)

    assert Search("batch", predict).run(4) == (None, "batch changes nothing in what a step needs")
    assert len(asked) == 5


def test_what_grows_has_no_largest():
    predict, asked = pretended(SHAPES["linear"], fits=GROWS)

    assert Search("batch", predict).run(4) == (None, "it grows with every step: nothing fits for long")
    assert asked == [4]


def test_a_search_ends_somewhere():
    predict, asked = pretended(lambda value: 1000 + value)

    assert Search("batch", predict).run(4) == (HIGHEST, "no larger one was tried")
    assert len(asked) < 40


@pytest.mark.parametrize("stride", [None, 1, 7])
@pytest.mark.parametrize("start", [1, 5, 64, 1000])
def test_any_stride_finds_the_same(start, stride):
    for wanted in (0, 1, 2, 63, 64, 65, 500):
        assert largest(lambda number, wanted=wanted: number <= wanted, start, stride) == wanted
