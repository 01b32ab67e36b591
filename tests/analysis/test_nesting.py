"""Which event contains which, against a plain reading of the definition."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.structure.nesting import ancestor
from stepscope.trace import assemble
from stepscope.trace.assemble import nest
from stepscope.trace.tables import HOST


def host(events: list[tuple[int, int, int]]) -> pl.DataFrame:
    """Events given as thread, start, duration."""
    rows = {
        "event": list(range(len(events))),
        "kind": ["op"] * len(events),
        "name": [f"op{i}" for i in range(len(events))],
        "thread": [e[0] for e in events],
        "start_ns": [e[1] for e in events],
        "duration_ns": [e[2] for e in events],
    }
    schema = {name: HOST.schema[name] for name in rows}
    return pl.concat([HOST.empty(), pl.DataFrame(rows, schema=schema)], how="diagonal")


def parents(events: list[tuple[int, int, int]]) -> dict[int, int | None]:
    """Event to the event it is in."""
    nested = nest(host(events))
    return {e: None if p is None else nested["event"][p] for e, p in zip(nested["event"], nested["parent"])}


def test_the_innermost_open_event_is_the_parent():
    # GIVEN an op with two ops inside, one of which has its own, and another thread at the same time
    events = [(0, 0, 100), (0, 10, 20), (0, 15, 5), (0, 50, 10), (1, 12, 3)]

    assert parents(events) == {0: None, 1: 0, 2: 1, 3: 0, 4: None}
    assert nest(host(events)).sort("event")["self_ns"].to_list() == [70, 15, 5, 10, 3]


def test_events_that_touch_do_not_nest_and_events_of_no_length_hold_nothing():
    assert parents([(0, 0, 10), (0, 10, 10), (0, 10, 0), (0, 10, 0)]) == {0: None, 1: None, 2: 1, 3: 1}


def test_of_two_with_one_start_the_longer_is_outside():
    assert parents([(0, 0, 5), (0, 0, 9)]) == {0: 1, 1: None}


def test_slices_that_overlap_in_part_share_no_time():
    # GIVEN B starts in A and ends after it, and C starts after A's end but in B
    events = [(0, 0, 10), (0, 5, 10), (0, 12, 2)]

    assert parents(events) == {0: None, 1: 0, 2: 1}
    assert nest(host(events)).sort("event")["self_ns"].to_list() == [5, 8, 2]


many = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 25)), max_size=40)


@given(many)
def test_self_times_add_up_to_the_time_a_thread_covers(events):
    nested = nest(host(events))
    covered = {(t, moment) for t, start, length in events for moment in range(start, start + length)}

    assert int(nested["self_ns"].sum() or 0) == len(covered)
    assert (nested["self_ns"] >= 0).all()


@given(many)
def test_columns_and_loop_find_the_same_parents(events):
    by_loop = parents(events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "_LARGE", 1)

        assert parents(events) == by_loop


@given(many)
def test_a_parent_is_open_when_its_child_starts(events):
    nested = nest(host(events))
    for start, parent in zip(nested["start_ns"], nested["parent"]):
        if parent is not None:
            assert nested["start_ns"][parent] <= start < nested["start_ns"][parent] + nested["duration_ns"][parent]


def test_the_wanted_ancestor_is_the_innermost_at_or_above():
    nested = nest(host([(0, 0, 100), (0, 1, 50), (0, 2, 10), (1, 0, 5)]))
    names = nested["name"].cast(pl.String)

    found = ancestor(nested, names.is_in(["op0", "op1"]))

    assert [None if row is None else names[row] for row in found] == ["op0", "op1", "op1", None]
