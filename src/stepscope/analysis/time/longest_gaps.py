"""The longest times in which the GPU was idle, each with what the host was doing."""

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import last_started
from stepscope.analysis.time.idle_causes import with_next_work

_NUM_GAPS = 1000  # number of gaps listed individually; finding the host's activity costs a search each


def longest_gaps(linked: Linked, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return the thousand longest idle gaps with main `cause`, `step`, `host` (open events of the launching thread,
    outermost first) and `next_kernel`, the longest first."""
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    longest = (
        gaps.with_columns(length)
        .sort("duration_ns", descending=True)
        .group_by("gap", maintain_order=True)
        .agg(
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            pl.col("cause").first().cast(pl.String),
            ((pl.col("start_ns") + pl.col("end_ns")) // 2).first().alias("middle"),
        )
        .with_columns(length)
        .sort("duration_ns", "start_ns", descending=[True, False])
        .head(_NUM_GAPS)
    )
    longest = with_next_work(longest, linked.device)
    host, next_kernel = _open_at(linked.host, longest["launch"], longest["middle"]), pl.col("name").cast(pl.String)
    return longest.select("start_ns", "duration_ns", "cause", "step", host, next_kernel.alias("next_kernel"))


def _open_at(host: pl.DataFrame, launches: pl.Series, times_ns: pl.Series) -> pl.Series:
    """Return the four innermost names open on the launching threads at some moments, outermost first."""
    is_overhead = host["kind"] == "overhead"

    def passes(row: pl.Series) -> pl.Series:
        return ((host["end_ns"].gather(row) <= times_ns) | is_overhead.gather(row)).fill_null(False)

    row = last_started(host, host["thread"].gather(launches), times_ns)
    names: list[pl.Series] = []
    for place in range(4):
        while (passed := passes(row)).any():
            row = host["parent"].gather(row).zip_with(passed, row)
        names.append(host["name"].gather(row).cast(pl.String).alias(str(place)))
        row = host["parent"].gather(row)
    joined = pl.concat_str(names[::-1], separator=" > ", ignore_nulls=True)
    return pl.select(pl.when(names[0].is_not_null()).then(joined).alias("host"))["host"]
