"""Exact integer arithmetic on time intervals.

Intervals are half open: they include their start but not their end. Tables have columns `start_ns` and `end_ns`.
"""

from collections.abc import Mapping, Sequence

import polars as pl


def spans(events: pl.DataFrame, where: pl.Series | pl.Expr | None = None) -> pl.DataFrame:
    """Return the intervals of events that have `start_ns` and `duration_ns`, optionally of a part of them."""
    both = pl.col("start_ns"), (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    return events.select(both if where is None else (column.filter(where) for column in both))


def union(intervals: pl.DataFrame) -> pl.DataFrame:
    """Return the same time as disjoint intervals in order.

    >>> union(pl.DataFrame({"start_ns": [5, 0, 2], "end_ns": [7, 3, 4]})).rows()
    [(0, 4), (5, 7)]
    """
    if intervals.height < _FEW:
        return _union_of_few(intervals["start_ns"], intervals["end_ns"])
    start, reach = pl.col("start_ns"), pl.col("end_ns")
    ordered = intervals.filter(reach > start).sort("start_ns").select(start, reach.cum_max())
    # A start after all earlier ends begins a new interval.
    is_first = (start > reach.shift(1)).fill_null(True)
    is_last = (start.shift(-1) > reach).fill_null(True)
    return ordered.select(start.filter(is_first), reach.filter(is_last))


_FEW = 64  # intervals, as most causes of idle time have: four queries would take ten times as long


def _union_of_few(starts: pl.Series, ends: pl.Series) -> pl.DataFrame:
    joined: list[list[int]] = []
    for start, end in sorted((start, end) for start, end in zip(starts, ends) if None not in (start, end)):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        elif end > start:
            joined.append([start, end])
    return pl.DataFrame(joined, schema={"start_ns": starts.dtype, "end_ns": ends.dtype}, orient="row")


def length_ns(intervals: pl.DataFrame) -> int:
    """Return the sum of the lengths, counting overlaps repeatedly.

    >>> length_ns(pl.DataFrame({"start_ns": [0, 2], "end_ns": [3, 4]}))
    5
    """
    return int((intervals["end_ns"] - intervals["start_ns"]).sum())


def covered_before(disjoint: pl.DataFrame, times: pl.Series, weights: pl.Series | None = None) -> pl.Series:
    """Return how much of disjoint, ordered intervals lies before each time; with `weights`, of their lengths.

    >>> covered_before(pl.DataFrame({"start_ns": [0, 6], "end_ns": [4, 9]}), pl.Series([-1, 3, 5, 8])).to_list()
    [0, 3, 4, 6]
    """
    place = pl.Series(disjoint["start_ns"].search_sorted(times, side="right"))
    lengths, ends = disjoint["end_ns"] - disjoint["start_ns"], pl.Series([None], dtype=pl.Int64)
    left = (ends.append(disjoint["end_ns"]).gather(place) - times).clip(0)
    if weights is not None:
        lengths, left = lengths * weights, left * weights.clear(1).append(weights).gather(place)
    whole = pl.zeros(1, lengths.dtype, eager=True).append(lengths.cum_sum())
    before: pl.Series = whole.gather(place) - left.fill_null(0)
    return before


def sweep(sets: Mapping[str, pl.DataFrame], cuts: pl.Series | None = None) -> pl.DataFrame:
    """Return the time from the first start to the last end, cut wherever a set begins or ends, and at `cuts`.

    Each row has one boolean per set: whether the set covers it. Rows have no gaps between them, so sums are exact.

    >>> sweep({"a": pl.DataFrame({"start_ns": [0], "end_ns": [4]}),
    ...        "b": pl.DataFrame({"start_ns": [3], "end_ns": [9]})}).rows()
    [(0, 3, True, False), (3, 4, True, True), (4, 9, False, True)]
    """
    # One bit per set, added at its start and subtracted at its end: the cumulative sum shows which sets cover a
    # moment.
    edges = [_edges(cuts.cast(pl.Int64), 0)] if cuts is not None else []
    for bit, intervals in enumerate(sets.values()):
        disjoint = union(intervals)
        edges += [_edges(disjoint["start_ns"], 1 << bit), _edges(disjoint["end_ns"], -(1 << bit))]
    marks = pl.concat(edges).sort("time").with_columns(pl.col("covering").cum_sum())
    marks = marks.filter((pl.col("time") != pl.col("time").shift(-1)).fill_null(True))
    return marks.select(
        pl.col("time").alias("start_ns"),
        pl.col("time").shift(-1).alias("end_ns"),
        *((pl.col("covering") & (1 << bit) != 0).alias(name) for bit, name in enumerate(sets)),
    ).head(-1)


def last_covering(names: Sequence[str], otherwise: str | None = None) -> pl.Expr:
    """Return the last of these sets that covers a row of `sweep`."""
    # One byte for each row and name, not a text.
    dtype = pl.Enum(list(dict.fromkeys([*names, otherwise or names[0]])))
    covering = (pl.when(pl.col(name)).then(pl.lit(name, dtype)) for name in reversed(names))
    return pl.coalesce(*covering, pl.lit(otherwise, dtype)).cast(pl.String)


def _edges(times: pl.Series, covering: int) -> pl.DataFrame:
    same = pl.Series([covering], dtype=pl.Int32).new_from_index(0, len(times))
    return pl.DataFrame({"time": times, "covering": same})


def intersect(left: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame:
    """Return the time that both cover, as disjoint intervals.

    >>> intersect(pl.DataFrame({"start_ns": [0], "end_ns": [4]}),
    ...           pl.DataFrame({"start_ns": [3, 8], "end_ns": [6, 9]})).rows()
    [(3, 4)]
    """
    both = sweep({"left": left, "right": right}).filter("left", "right")
    return union(both)


def complement(intervals: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    """Return the time between two moments that the intervals do not cover.

    >>> complement(pl.DataFrame({"start_ns": [2], "end_ns": [3]}), 0, 5).rows()
    [(0, 2), (3, 5)]
    """
    window = pl.DataFrame({"start_ns": [start_ns], "end_ns": [end_ns]})
    return union(sweep({"window": window, "taken": intervals}).filter("window", ~pl.col("taken")))
