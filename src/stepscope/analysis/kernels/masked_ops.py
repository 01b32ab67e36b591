"""Ops that select elements by a mask, and what they would cost with a fixed output shape."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import is_aten_op, outermost

_COUNTING = "^aten::nonzero$"
_CHOOSING = r"^aten::(index|index_put_?|_index_put_impl_|masked_select)$"


def mask_indexing(linked: Linked) -> pl.DataFrame:
    """Return ops such as `x[mask]` and `x[mask] = y`, and their backwards, that count a mask's elements, by time.

    For a fixed-shape op in their place: `factor` is the share of their host time that a typical op takes (the trace's
    median for outermost ops with one kernel), `events` the GPU work no longer needed (all but the longest event).
    """
    host, device = linked.host, linked.device
    is_aten = is_aten_op(host)
    counting = host["row"].filter(is_aten & matches(host["name"], _COUNTING))
    choosing = outermost(host, counting, is_aten).unique().sort()
    choosing = choosing.filter(matches(host["name"].gather(choosing), _CHOOSING))
    work = device.select(
        pl.col("event").cast(pl.Int64), outermost(host, device["op"], is_aten).alias("row"), "duration_ns"
    )
    work = work.drop_nulls("row").sort("row", "duration_ns", "event")
    events = pl.col("event").head(pl.len() - 1).alias("events")
    given = work.group_by("row", maintain_order=True).agg(pl.len(), events)
    single = given.filter(pl.col("len") == 1, ~pl.col("row").is_in(choosing.implode()))["row"]
    usual_ns = host["duration_ns"].gather(single).median()
    ops = host.select("row", "start_ns", "end_ns", "step", "duration_ns").gather(choosing)
    ops = ops.join(given, on="row", how="left").sort("start_ns")
    left = (pl.lit(usual_ns, pl.Float64) / pl.col("duration_ns")).clip(0, 1).fill_null(1.0)
    return ops.select("start_ns", "end_ns", "step", left.alias("factor"), "events")
