"""Calls of what torch.compile made: which were entered from which, and what the host spent to enter them."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.intervals import spans, sweep, union
from stepscope.analysis.links import Linked
from stepscope.analysis.names import matches
from stepscope.analysis.nesting import ancestor

_REGION = "^Torch-Compiled Region"
_LOOKUP = "^TorchDynamo Cache Lookup"
_BACKWARD = "^CompiledFunctionBackward$"
_WORKING = r"^## Call CompiledFxGraph|^aten::|^triton_"


def compiled_regions(linked: Linked) -> pl.DataFrame:
    """Regions in order of time: `name`, `start_ns`, `end_ns`, `step`, and `is_nested`, whether another one called it:
    what comes after a graph break is called by what came before it, while regions that somebody compiled one by one
    are called from outside."""
    host = linked.host
    is_region = matches(host["name"], _REGION)
    around = ancestor(host, is_region).gather(host["parent"])
    regions = host.with_columns(around.is_not_null().alias("is_nested")).filter(is_region)
    return regions.select(pl.col("name").cast(pl.String), "start_ns", "end_ns", "step", "is_nested").sort("start_ns")


def entering(linked: Linked, regions: pl.DataFrame, all_but_first: bool) -> pl.DataFrame:
    """The host's time that goes into calling nested regions, or all but the first of a step, and their backwards,
    outside the compiled code itself: `start_ns`, `end_ns`, disjoint."""
    host = linked.host
    is_later = pl.int_range(pl.len()).over("step") > 0
    called = regions.filter(is_later if all_but_first else "is_nested")
    if called.is_empty():
        return called.select("start_ns", "end_ns")
    lookups = host.filter(matches(host["name"], _LOOKUP)).sort("start_ns")
    # A region's lookup comes right before it, on its way in.
    before = called.select("start_ns").join_asof(
        lookups.select("start_ns", pl.col("start_ns").alias("begin"), "end_ns"), on="start_ns", check_sortedness=False
    )
    before = before.select(pl.col("begin").alias("start_ns"), "end_ns").drop_nulls()
    backwards = host.filter(matches(host["name"], _BACKWARD)).sort("start_ns").filter(is_later)
    whole = union(pl.concat([called.select("start_ns", "end_ns"), before, spans(backwards)]))
    is_work = host["kind"].is_in(["runtime", "driver"]) | matches(host["name"], _WORKING)
    pieces = sweep({"whole": whole, "work": spans(host, is_work)})
    return union(pieces.filter("whole", ~pl.col("work")))


def regions_by_name(regions: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Regions by `name` and `is_nested`: `num_calls` and `host_ns`, with all that each calls, a step; most first."""
    length = pl.col("end_ns") - pl.col("start_ns")
    return (
        regions.group_by("name", "is_nested")
        .agg((pl.len() / num_steps).alias("num_calls"), (length.sum() / num_steps).alias("host_ns"))
        .sort("host_ns", "name", descending=[True, False])
    )
