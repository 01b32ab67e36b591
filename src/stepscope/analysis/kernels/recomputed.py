"""Forward work repeated in the backward: activation checkpointing."""

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor


def recomputed(linked: Linked, work: pl.DataFrame) -> pl.DataFrame:
    """Return outermost ops that ran again inside the backward, by time, with their GPU work in `events`.

    Autograd numbers an op when it records a gradient through it. In a backward, that happens only if a forward is
    recomputed or with `create_graph=True`; in the latter case, no forward in the trace has such an op with these
    shapes.
    """
    host = linked.host
    is_node = _is_node(host)
    is_inside = ancestor(host, is_node).is_not_null() & ~is_node
    candidates = host.filter(_is_numbered(host) & is_inside, host["shapes"].is_not_null())
    key = ("name", "shapes", "dtypes")
    ahead = host.filter((host["kind"] == "op") & ~is_inside & ~is_node, host["shapes"].is_not_null())
    rows = candidates.join(ahead, on=key, how="semi", nulls_equal=True)["row"]
    is_again = host["row"].is_in(rows.implode())
    tops = rows.filter(ancestor(host, is_again).gather(host["parent"].gather(rows)).is_null())
    top_of = host.select("row", ancestor(host, host["row"].is_in(tops.implode())).alias("top")).drop_nulls()
    done = work.select(pl.col("call").alias("row"), pl.col("event").cast(pl.Int64), "duration_ns").join(
        top_of, on="row"
    )
    done = done.group_by("top").agg(pl.col("event").cast(pl.Int64).alias("events"), pl.col("duration_ns").sum())
    taken = linked.memory.filter(pl.col("bytes") > 0, pl.col("device_type") != 0)
    taken = taken.select(pl.col("op").alias("row"), pl.col("bytes").alias("allocated_bytes")).join(top_of, on="row")
    taken = taken.group_by("top").agg(pl.col("allocated_bytes").sum())
    return (
        host.join(done, left_on="row", right_on="top", maintain_order="left", suffix="_done")
        .join(taken, left_on="row", right_on="top", how="left", maintain_order="left")
        .select(
            "row", pl.col("name").cast(pl.String), "start_ns", "end_ns", pl.col("allocated_bytes").fill_null(0),
            "events", pl.col("duration_ns_done").alias("duration_ns"),
        )
    )  # fmt: skip


def is_run_again(host: pl.DataFrame) -> pl.Series:
    """Return for each host event whether a backward was recording gradients again around it or at it."""
    is_node = _is_node(host)
    is_inside = ancestor(host, is_node).is_not_null() & ~is_node
    return ancestor(host, _is_numbered(host) & is_inside).is_not_null()


def _is_node(host: pl.DataFrame) -> pl.Series:
    """Return autograd nodes: ops with the sequence number of their forward op."""
    return ((host["kind"] == "op") & (host["sequence"] >= 0) & (host["forward_thread"] > 0)).fill_null(False)


def _is_numbered(host: pl.DataFrame) -> pl.Series:
    """Return ops that a gradient was recorded through."""
    is_numbered = (host["sequence"] >= 0) & (host["forward_thread"].fill_null(0) == 0)
    return ((host["kind"] == "op") & is_numbered).fill_null(False)
