"""Arithmetic of time intervals: integers in, integers out, exact.

An interval is half open: it holds its start and not its end. Frames have columns `start_ns` and `end_ns`.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl


def spans(events: pl.DataFrame) -> pl.DataFrame:
    """The intervals of events that have `start_ns` and `duration_ns`."""
    return events.select("start_ns", (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"))


def union(intervals: pl.DataFrame) -> pl.DataFrame:
    """The same time as disjoint intervals in order.

    >>> union(pl.DataFrame({"start_ns": [5, 0, 2], "end_ns": [7, 3, 4]})).rows()
    [(0, 4), (5, 7)]
    """
    ordered = intervals.filter(pl.col("end_ns") > pl.col("start_ns")).select("start_ns", "end_ns").sort("start_ns")
    reach = pl.col("end_ns").cum_max().shift(1)
    return (
        ordered.with_columns((pl.col("start_ns") > reach).fill_null(True).cum_sum().alias("group"))
        .group_by("group", maintain_order=True)
        .agg(pl.col("start_ns").first(), pl.col("end_ns").max())
        .drop("group")
    )


def length_ns(intervals: pl.DataFrame) -> int:
    """Sum of the lengths, overlaps counted as often as they occur.

    >>> length_ns(pl.DataFrame({"start_ns": [0, 2], "end_ns": [3, 4]}))
    5
    """
    return int((intervals["end_ns"] - intervals["start_ns"]).sum())


def sweep(sets: Mapping[str, pl.DataFrame], cuts: pl.Series | None = None) -> pl.DataFrame:
    """All the time between the first start and the last end, cut wherever a set begins or ends, and at `cuts`.

    Each row is a stretch with one boolean a set: whether the set covers it. Stretches follow one another without a
    gap, so that any sum over them is a sum over the whole.

    >>> sweep({"a": pl.DataFrame({"start_ns": [0], "end_ns": [4]}),
    ...        "b": pl.DataFrame({"start_ns": [3], "end_ns": [9]})}).rows()
    [(0, 3, True, False), (3, 4, True, True), (4, 9, False, True)]
    """
    edges = [
        pl.concat(
            [
                disjoint.select(pl.col("start_ns").alias("time"), pl.lit(1, pl.Int32).alias(name)),
                disjoint.select(pl.col("end_ns").alias("time"), pl.lit(-1, pl.Int32).alias(name)),
            ]
        )
        for name, intervals in sets.items()
        for disjoint in [union(intervals)]
    ]
    if cuts is not None:
        edges.append(pl.DataFrame({"time": cuts.cast(pl.Int64)}))
    marks = pl.concat(edges, how="diagonal").group_by("time").agg(pl.col(name).sum() for name in sets).sort("time")
    return marks.select(
        pl.col("time").alias("start_ns"),
        pl.col("time").shift(-1).alias("end_ns"),
        *((pl.col(name).cum_sum() > 0).alias(name) for name in sets),
    ).head(-1)


def intersect(left: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame:
    """The time that both cover, as disjoint intervals.

    >>> intersect(pl.DataFrame({"start_ns": [0], "end_ns": [4]}),
    ...           pl.DataFrame({"start_ns": [3, 8], "end_ns": [6, 9]})).rows()
    [(3, 4)]
    """
    both = sweep({"left": left, "right": right}).filter("left", "right")
    return union(both)


def complement(intervals: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    """The time between two moments that the intervals leave free.

    >>> complement(pl.DataFrame({"start_ns": [2], "end_ns": [3]}), 0, 5).rows()
    [(0, 2), (3, 5)]
    """
    window = pl.DataFrame({"start_ns": [start_ns], "end_ns": [end_ns]})
    return union(sweep({"window": window, "taken": intervals}).filter("window", ~pl.col("taken")))
