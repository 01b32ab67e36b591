"""Where on a trace's timeline to look: a few stretches, most relevant first."""

import polars as pl

from stepscope.analysis.structure.intervals import union

MOST_PLACES = 20  # more stretches than anyone looks at
_JOINED_NS = 1_000_000  # consecutive work is one stretch, unless the GPU is idle for longer than this in between

Places = tuple[tuple[int, int], ...]


def places_of_stretches(stretches: pl.DataFrame) -> Places:
    """Return stretches of `start_ns` and `end_ns`, made disjoint, longest first."""
    return _best(union(stretches).with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("ns")))


def places_of_work(work: pl.DataFrame, is_meant: pl.Series) -> Places:
    """Return stretches of the GPU work that `is_meant` selects, most work first.

    `work` has `start_ns`, `duration_ns`, `device`, `stream` and `step`. Consecutive pieces on a stream, within a step
    and with no other work in between, are one stretch.
    """
    lane = ["device", "stream"]
    end = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    ordered = work.with_columns(end, is_meant.alias("is_meant")).sort(*lane, "start_ns", "end_ns")
    follows = (
        pl.col("is_meant").shift(1)
        & (pl.col("step").eq_missing(pl.col("step").shift(1)))
        & (pl.col("start_ns") - pl.col("end_ns").shift(1) < _JOINED_NS)
    ).over(lane)
    marked = ordered.with_columns((~follows.fill_null(False)).cum_sum().alias("stretch")).filter("is_meant")
    found = marked.group_by("stretch", maintain_order=True).agg(
        pl.col("start_ns").min(), pl.col("end_ns").max(), pl.col("duration_ns").sum().alias("ns")
    )
    return _best(found)


def places_without_work(idle: pl.DataFrame) -> Places:
    """Return stretches in which the GPU is idle again and again, most idle time first.

    `idle` has disjoint `start_ns` and `end_ns`, in order. Work that is shorter than the idle time around it does not
    divide a stretch.
    """
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
    worked = pl.col("start_ns") - pl.col("end_ns").shift(1)
    divides = (worked > pl.max_horizontal(length, length.shift(1))).fill_null(True)
    found = idle.with_columns(length, divides.cum_sum().alias("stretch")).group_by("stretch", maintain_order=True)
    return _best(found.agg(pl.col("start_ns").min(), pl.col("end_ns").max(), pl.col("ns").sum()))


def _best(found: pl.DataFrame) -> Places:
    best = found.sort("ns", "start_ns", descending=[True, False]).head(MOST_PLACES)
    return tuple(best.select("start_ns", "end_ns").iter_rows())
