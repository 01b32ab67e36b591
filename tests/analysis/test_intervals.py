"""Interval arithmetic against counting single nanoseconds."""

from __future__ import annotations

from itertools import pairwise

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.structure.intervals import _FEW, complement, intersect, length_ns, sweep, union

pairs = st.tuples(st.integers(-20, 40), st.integers(0, 15)).map(lambda p: (p[0], p[0] + p[1]))
sets = st.lists(pairs, max_size=12)


def frame(intervals: list[tuple[int, int]]) -> pl.DataFrame:
    return pl.DataFrame(intervals, schema={"start_ns": pl.Int64, "end_ns": pl.Int64}, orient="row")


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(sets)
def test_a_union_covers_the_same_moments_once(intervals):
    """GIVEN few intervals, or the same many times over THEN both ways to join them return the same."""
    joined = union(frame(intervals))

    assert length_ns(joined) == len(moments(intervals))
    assert moments(joined.rows()) == moments(intervals)
    assert all(before[1] < after[0] for before, after in pairwise(joined.rows()))
    assert joined.equals(union(frame(intervals * _FEW)))


@given(sets, sets)
def test_an_intersection_covers_what_both_cover(left, right):
    assert moments(intersect(frame(left), frame(right)).rows()) == moments(left) & moments(right)


@given(sets)
def test_a_complement_and_its_set_tile_the_window(intervals):
    free = complement(frame(intervals), -30, 70)

    assert moments(free.rows()) == set(range(-30, 70)) - moments(intervals)


@given(sets, sets, sets)
def test_a_sweep_tiles_the_time_and_tells_who_covers_it(first, second, third):
    given_sets = {"first": first, "second": second, "third": third}
    rows = sweep({name: frame(intervals) for name, intervals in given_sets.items()}).rows(named=True)

    assert all(before["end_ns"] == after["start_ns"] for before, after in pairwise(rows))
    for name, intervals in given_sets.items():
        assert moments([(row["start_ns"], row["end_ns"]) for row in rows if row[name]]) == moments(intervals)


def test_times_since_1970_keep_their_nanoseconds():
    start = 1_712_195_495_505_582_988
    joined = union(frame([(start, start + 3), (start + 2, start + 5)]))

    assert joined.rows() == [(start, start + 5)]
