"""Calls of compiled regions: which called which, and the host time spent entering them."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.analysis.structure.intervals import spans, sweep, union
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.modules import named_regions
from stepscope.analysis.structure.nesting import ancestor, matches

_REGION = "^Torch-Compiled Region"
_LOOKUP = "^TorchDynamo Cache Lookup"
_BACKWARD = "^(autograd::engine::evaluate_function: )?CompiledFunctionBackward$"
_CODE = "^## Call CompiledFxGraph"
_WORKING = "^aten::|^triton_"
_DIFFERENTIATED = "^CompiledFunction$"
_NODE = "^autograd::engine::evaluate_function"
_IN_A_ROW = 4
"""Regions called from outside in a row within a forward; from this many on, they are pieces of one model."""


def compiled_regions(linked: Linked) -> pl.DataFrame:
    """Return compiled regions by time: `name`, `start_ns`, `end_ns`, `step`, `is_nested`, `follows`.

    `is_nested`: called by another region, as after a graph break. `follows`: a later one of four or more regions
    called in a row without a backward between, as with a graph break in a loop or separately compiled blocks.
    Repeated calls of one region, as for micro-batches, do not count as a row.
    """
    host = linked.host
    is_region = matches(host["name"], _REGION)
    around = ancestor(host, is_region).gather(host["parent"])
    regions = host.with_columns(around.is_not_null().alias("is_nested")).filter(is_region)
    regions = regions.select("row", pl.col("name").cast(pl.String), "start_ns", "end_ns", "step", "is_nested")
    inside = ancestor(host, is_region).filter(matches(host["name"], _DIFFERENTIATED)).drop_nulls()
    nodes = host["start_ns"].filter(matches(host["name"], _NODE)).sort()
    regions = regions.sort("start_ns").with_columns(pl.col("row").is_in(inside.implode()).alias("is_differentiated"))
    regions = regions.with_columns(pl.Series("num_nodes", nodes.search_sorted(regions["start_ns"]), dtype=pl.Int64))
    row = ("step", "num_nodes", "is_nested", "is_differentiated")
    is_in_row = ~pl.col("is_nested") & pl.col("is_differentiated") & (pl.len().over(row) >= _IN_A_ROW)
    follows = (is_in_row & (pl.int_range(pl.len()).over(row) > 0)).alias("follows")
    return regions.select("name", "start_ns", "end_ns", "step", "is_nested", follows)


def entering(linked: Linked, regions: pl.DataFrame, all_but_first: bool) -> pl.DataFrame:
    """Return host time spent entering nested or following regions (or all but the first), and their backwards.

    Disjoint `start_ns`, `end_ns`: from the end of the region before in its row, else from its lookup, to the first op
    of the compiled code, and after its end. Ops and launches in between are excluded.
    """
    host = linked.host
    is_later = pl.int_range(pl.len()).over("step") > 0
    called = regions.with_columns(pl.when("follows").then(pl.col("end_ns").shift(1)).alias("begin"))
    called = called.filter(is_later if all_but_first else pl.col("is_nested") | pl.col("follows"))
    if called.is_empty():
        return called.select("start_ns", "end_ns")
    lookups = host.filter(matches(host["name"], _LOOKUP)).sort("start_ns")
    # A region's lookup comes right before it.
    before = called.select("start_ns").join_asof(
        lookups.select("start_ns", pl.col("start_ns").alias("begin"), "end_ns"), on="start_ns", check_sortedness=False
    )
    before = before.select(pl.col("begin").alias("start_ns"), "end_ns").drop_nulls()
    between = called.select(pl.col("begin").alias("start_ns"), pl.col("start_ns").alias("end_ns")).drop_nulls()
    backwards = host.filter(matches(host["name"], _BACKWARD)).sort("start_ns")
    backwards = backwards.filter(pl.int_range(pl.len()).over("step", "name") > 0)
    whole = union(pl.concat([called.select("start_ns", "end_ns"), before, between, spans(backwards)]))
    is_work = host["kind"].is_in(["runtime", "driver"]) | matches(host["name"], _WORKING)
    pieces = sweep({"whole": whole, "work": pl.concat([spans(host, is_work), _code(host)])})
    return union(pieces.filter("whole", ~pl.col("work")))


def _code(host: pl.DataFrame) -> pl.DataFrame:
    """Return calls of compiled code from the first event in each; before that, it unpacks arguments."""
    calls = host.filter(matches(host["name"], _CODE))
    inside = host.filter(pl.col("parent").is_in(calls["row"].implode())).group_by("parent")
    first = inside.agg(pl.col("start_ns").min().alias("first_ns")).rename({"parent": "row"})
    calls = calls.join(first, on="row", how="left")
    return calls.select(pl.coalesce("first_ns", "start_ns").alias("start_ns"), "end_ns")


def regions_by_name(regions: pl.DataFrame, num_steps: int, compiler: Mapping[str, Any]) -> pl.DataFrame:
    """Return `num_calls` and `host_ns` (with everything called) per step by region `name` and `is_nested`."""
    length = pl.col("end_ns") - pl.col("start_ns")
    return (
        regions.with_columns(named_regions(regions["name"], compiler))
        .group_by("name", "is_nested")
        .agg((pl.len() / num_steps).alias("num_calls"), (length.sum() / num_steps).alias("host_ns"))
        .sort("host_ns", "name", descending=[True, False])
    )
