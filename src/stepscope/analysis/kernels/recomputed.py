"""Forward work that is done again in the backward: activation checkpointing as a trace shows it."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor

_SCHEMA = pl.Schema(
    {
        "row": pl.UInt32(), "name": pl.String(), "start_ns": pl.Int64(), "end_ns": pl.Int64(),
        "allocated_bytes": pl.Int64(), "events": pl.List(pl.Int64()), "duration_ns": pl.Int64(),
    }
)  # fmt: skip


def recomputed(linked: Linked, work: pl.DataFrame) -> pl.DataFrame:
    """Outermost ops that ran again inside the backward, in order of time, with `events`, the GPU work of theirs.

    Autograd numbers an op when a gradient is recorded through it. In a backward that happens only where a forward is
    run again; where the gradient's own graph is kept (`create_graph=True`) the ops are those of the backward, which
    no forward of the trace has called with these shapes. `row` of the host table, `name`, `start_ns`, `end_ns`,
    `allocated_bytes` on the GPU, `duration_ns` on the device.
    """
    host = linked.host
    is_op = host["kind"] == "op"
    is_node = _is_node(host)
    is_inside = ancestor(host, is_node).is_not_null() & ~is_node
    candidates = host.filter(_is_numbered(host) & is_inside, host["shapes"].is_not_null())
    key = ("name", "shapes", "dtypes")
    ahead = host.filter(is_op & ~is_inside & ~is_node, host["shapes"].is_not_null())
    again = candidates.join(ahead.select(key).unique(), on=key, how="semi", nulls_equal=True)
    rows = again["row"]
    if rows.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    is_again = host["row"].is_in(rows.implode())
    above = ancestor(host, is_again).gather(host["parent"].gather(rows))
    tops = rows.filter(above.is_null())
    top_of = pl.DataFrame({"row": host["row"], "top": ancestor(host, host["row"].is_in(tops.implode()))}).drop_nulls()
    done = work.select(pl.col("call").alias("row"), "event", "duration_ns").join(top_of, on="row")
    done = done.group_by("top").agg(pl.col("event").alias("events"), pl.col("duration_ns").sum())
    taken = linked.memory.filter(pl.col("bytes") > 0, pl.col("device_type") != 0).select(
        pl.col("op").alias("row"), "bytes"
    )
    taken = taken.join(top_of, on="row").group_by("top").agg(pl.col("bytes").sum().alias("allocated_bytes"))
    table = host.select("row", pl.col("name").cast(pl.String), "start_ns", "end_ns").filter(
        host["row"].is_in(done["top"].implode())
    )
    return (
        table.join(taken, left_on="row", right_on="top", how="left", maintain_order="left")
        .join(done, left_on="row", right_on="top", how="left", maintain_order="left")
        .with_columns(pl.col("allocated_bytes").fill_null(0))
        .select(_SCHEMA.names())
        .cast(_SCHEMA)
    )


def is_run_again(host: pl.DataFrame) -> pl.Series:
    """Of each event of a host table, whether a backward was recording gradients anew around it or at it."""
    is_node = _is_node(host)
    is_inside = ancestor(host, is_node).is_not_null() & ~is_node
    return ancestor(host, _is_numbered(host) & is_inside).is_not_null()


def _is_node(host: pl.DataFrame) -> pl.Series:
    """Autograd's nodes: ops with the number of the op whose backward they are."""
    return ((host["kind"] == "op") & (host["sequence"] >= 0) & (host["forward_thread"] > 0)).fill_null(False)


def _is_numbered(host: pl.DataFrame) -> pl.Series:
    """Ops through which a gradient was recorded."""
    is_numbered = (host["sequence"] >= 0) & (host["forward_thread"].fill_null(0) == 0)
    return ((host["kind"] == "op") & is_numbered).fill_null(False)
