"""Which window each step belongs to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.recorder import windows as names
from stepscope.recorder.windows import Windows

ANY = st.builds(
    Windows,
    warmup=st.integers(0, 5),
    clean=st.integers(0, 5),
    trace=st.integers(0, 4),
    memory=st.integers(0, 1),
    repeat=st.integers(1, 3),
)


def test_the_defaults_are_the_ones_the_command_line_names():
    windows = Windows()

    assert windows.counts() == {"warmup": 5, "clean": 20, "trace_warmup": 1, "trace": 2, "memory": 1}
    assert windows.num_steps == 29


def test_a_trace_window_that_is_repeated_is_warmed_up_each_time():
    windows = Windows(warmup=1, clean=0, trace=2, repeat=2, memory=1)
    cycle = ["trace_warmup", "trace", "trace"]

    assert [windows.at(step) for step in range(9)] == ["warmup", *cycle, *cycle, "memory", "free"]
    assert windows.counts()["trace"] == 4
    with pytest.raises(ValueError, match="repeat is 0"):
        Windows(repeat=0)


def test_no_trace_has_no_warm_up_for_it_either():
    windows = Windows(warmup=2, clean=1, trace=0, memory=1)

    assert [windows.at(step) for step in range(5)] == ["warmup", "warmup", "clean", "memory", "free"]


def test_nothing_at_all_is_free_from_the_first_step():
    windows = Windows(warmup=0, clean=0, trace=0, memory=0)

    assert windows.at(0) == "free" and windows.num_steps == 0


def test_the_progress_line_counts_the_traces_warm_up_as_a_part_of_it():
    windows = Windows(trace=3)

    assert (windows.at(25), windows.num_left(25)) == (names.TRACE_WARMUP, 4)
    assert (windows.at(26), windows.num_left(26)) == (names.TRACE, 3)
    assert (windows.num_left(5), windows.num_left(24), windows.num_left(99)) == (20, 1, 0)


@pytest.mark.parametrize("field", ["warmup", "clean", "trace", "memory"])
def test_negative_counts_are_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field} is -1"):
        Windows(**{field: -1})


def test_two_memory_steps_are_refused():
    with pytest.raises(ValueError, match="memory is 2"):
        Windows(memory=2)


def test_an_unknown_window_is_an_error():
    with pytest.raises(TypeError, match="tracing"):
        Windows(tracing=2)


@given(ANY)
def test_every_step_has_one_window_in_the_order_of_the_sequence(windows):
    expected = [name for name, count in windows.sequence for _ in range(count)]

    assert [windows.at(step) for step in range(windows.num_steps)] == expected
    assert windows.at(windows.num_steps) == windows.at(windows.num_steps + 1000) == "free"


@given(ANY)
def test_what_is_left_ends_where_another_window_begins(windows):
    for step in range(windows.num_steps):
        after = step + windows.num_left(step)
        assert {windows.at(between) for between in range(step, after)} <= {windows.at(step), "trace"}
        assert windows.at(after) not in ("trace", windows.at(after - 1))


def test_every_window_has_a_title():
    assert set(names.TITLES) == {name for name, _ in Windows().sequence} | {"free"}
