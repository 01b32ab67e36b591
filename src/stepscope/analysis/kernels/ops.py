"""Ops and modules: self and total time on host and device, nothing counted twice."""

import polars as pl

from stepscope.analysis.memory.module_tree import ancestors, starred
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor

_FIGURES = (
    "num_calls", "host_self_ns", "host_total_ns", "device_self_ns", "device_forward_ns", "device_backward_ns",
    "device_total_ns",
)  # fmt: skip


def ops(linked: Linked) -> pl.DataFrame:
    """Return self and total time on host and device by op.

    A launch belongs to the op that makes it. A recursive call adds nothing to the total. Host self times add up to
    the time covered by ops; device self times, with the row whose op is null, to all GPU work.
    """
    host = linked.host
    is_op = host["kind"] == "op"
    inner = ancestor(host, is_op)
    # An op's self time includes events inside it that are not ops, mostly launches.
    owned = host.select(host["name"].gather(inner), "self_ns").filter(inner.is_not_null())
    own = owned.group_by("name").agg(pl.col("self_ns").sum().alias("host_self_ns"))
    del owned, inner
    calls = host.select("name", _subtree_ends(host), "row").filter(is_op)
    num_calls = calls.group_by("name").agg(pl.len().cast(pl.Int64).alias("num_calls"))
    is_outermost = (pl.col("end").cum_max().shift(1) <= pl.col("row")).over("name").fill_null(True)
    calls = calls.filter(calls.select(is_outermost).to_series())
    by_name = (
        calls.select("name", host["duration_ns"].gather(calls["row"]), _device_ns(linked, calls))
        .group_by("name")
        .agg(
            pl.col("duration_ns").sum().alias("host_total_ns"),
            pl.col("device_ns").sum().alias("device_total_ns"),
        )
        .join(num_calls, on="name", nulls_equal=True)
        .join(own, on="name", nulls_equal=True)
    )
    gpu = linked.device.group_by("op_name").agg(pl.col("duration_ns").sum().alias("device_self_ns"))
    table = by_name.join(gpu, left_on="name", right_on="op_name", how="full", coalesce=True, nulls_equal=True)
    return table.select(
        pl.col("name").cast(pl.String).alias("op"),
        pl.col("num_calls", "host_self_ns", "host_total_ns", "device_self_ns").fill_null(0),
        pl.max_horizontal("device_total_ns", "device_self_ns").fill_null(0),
    ).sort("device_self_ns", "host_self_ns", "op", descending=[True, True, False], nulls_last=True)


def modules(linked: Linked) -> pl.DataFrame:
    """Return self, forward, backward and total time on host and device by module.

    Backward work belongs to the module of its forward. Forward, backward and totals include inner modules (names that
    start with the module's and a dot). The row with a null module is GPU work outside all modules; device self times
    add up to all GPU work.
    """
    if linked.modules.source == "none":
        return pl.DataFrame(schema={"module": pl.String(), **dict.fromkeys(_FIGURES, pl.Int64())})
    is_backward = pl.col("phase") == "backward"
    gpu = linked.device.group_by("module").agg(
        pl.col("duration_ns").filter(is_backward).sum().alias("backward_ns"),
        pl.col("duration_ns").sum().alias("device_self_ns"),
    )
    inside = linked.host.select("module", "self_ns").filter(pl.col("module").is_not_null())
    host = inside.group_by("module").agg(pl.col("self_ns").sum().alias("host_self_ns"))
    calls = linked.modules.calls.group_by("module").agg(pl.len().cast(pl.Int64).alias("num_calls"))
    table = (
        calls.join(host, on="module", how="full", coalesce=True)  # modules in compiled code are never called
        .join(gpu, on="module", how="full", coalesce=True, nulls_equal=True)
        .with_columns(pl.col("module").cast(pl.String))
        .fill_null(0)
    )
    return (
        table.join(_with_inner(table), on="module", how="left", nulls_equal=True)
        .with_columns((pl.col("device_total_ns") - pl.col("device_backward_ns")).alias("device_forward_ns"))
        .select("module", *_FIGURES)
        .sort("device_total_ns", "host_total_ns", "module", descending=[True, True, False], nulls_last=True)
    )


def module_groups(table: pl.DataFrame) -> pl.DataFrame:
    """Return modules grouped by name with numbers starred, `blocks.*.mlp`, with `num_modules`."""
    patterns = pl.Series("module", [starred(name) for name in table["module"]], dtype=pl.String)
    return (
        table.group_by(patterns, maintain_order=True)
        .agg(pl.len().cast(pl.Int64).alias("num_modules"), pl.col(_FIGURES).sum())
        .sort("device_total_ns", "host_total_ns", descending=True, maintain_order=True)
    )


def _subtree_ends(host: pl.DataFrame) -> pl.Series:
    """Return the row that ends each event's subtree: the next after the last one in it."""
    inner = host.select("parent", "row").filter(host["parent"].is_not_null())
    # Events follow their parent, so the last child is written last; without children it is the event itself.
    last: pl.Series = host["row"].clone().scatter(inner["parent"], inner["row"])
    while not (further := last.gather(last)).equals(last):
        last = further
    end: pl.Series = last + 1
    return end.alias("end")


def _device_ns(linked: Linked, calls: pl.DataFrame) -> pl.Series:
    """Return the GPU work launched anywhere inside some events, each from `row` to before row `end`."""
    work = linked.device.select("op", "duration_ns").drop_nulls("op").group_by("op").agg(pl.col("duration_ns").sum())
    work = work.sort("op")
    before = pl.zeros(1, pl.Int64, eager=True).append(work["duration_ns"].cum_sum())
    # Searching takes less memory than a sum for each host event.
    from_row, from_end = (before.gather(work["op"].search_sorted(calls[name])) for name in ("row", "end"))
    inside: pl.Series = from_end - from_row
    return inside.alias("device_ns")


def _with_inner(table: pl.DataFrame) -> pl.DataFrame:
    """Return host time and GPU work including inner modules, by module."""
    around = [[name for name in ancestors(module) if name or name == module] for module in table["module"]]
    figures = table.select(
        pl.Series("module", around, dtype=pl.List(pl.String)),
        pl.col("host_self_ns").alias("host_total_ns"),
        pl.col("device_self_ns").alias("device_total_ns"),
        pl.col("backward_ns").alias("device_backward_ns"),
    )
    return figures.explode("module").group_by("module").agg(pl.all().sum())
