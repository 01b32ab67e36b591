"""Where in a trace something is to be seen: a few stretches on its clock, the best first."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.structure.intervals import union

MOST_PLACES = 20
"""Nobody looks at more."""
_JOINED_NS = 1_000_000
"""Work that follows work with nothing else between is one stretch, unless the GPU stands for longer than this."""

Places = tuple[tuple[int, int], ...]


def places_of_stretches(stretches: pl.DataFrame) -> Places:
    """Stretches of `start_ns` and `end_ns`, made disjoint, the longest first."""
    whole = union(stretches)
    return _best(whole.with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("ns")))


def places_of_work(work: pl.DataFrame, is_meant: pl.Series) -> Places:
    """Stretches of some of the GPU's work, those with most of it first.

    `work` has `start_ns`, `duration_ns`, `device`, `stream` and `step`; `is_meant` says which of it. Pieces that
    follow one another on a stream with no other work between are one stretch, within a step.
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
    """Stretches in which the GPU stands again and again, those in which it stands longest first.

    `idle` is when it stood, `start_ns` and `end_ns`, disjoint and in order. What is shorter than the standing before
    and after it does not divide a stretch.
    """
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
    worked = pl.col("start_ns") - pl.col("end_ns").shift(1)
    divides = (worked > pl.max_horizontal(length, length.shift(1))).fill_null(True)
    found = idle.with_columns(length, divides.cum_sum().alias("stretch")).group_by("stretch", maintain_order=True)
    return _best(found.agg(pl.col("start_ns").min(), pl.col("end_ns").max(), pl.col("ns").sum()))


def _best(found: pl.DataFrame) -> Places:
    best = found.sort("ns", "start_ns", descending=[True, False]).head(MOST_PLACES)
    return tuple((start_ns, end_ns) for start_ns, end_ns in best.select("start_ns", "end_ns").iter_rows())
