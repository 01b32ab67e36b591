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
    calls = host.select("self_ns", inner.alias("op")).filter(~is_op).drop_nulls("op")
    inside = calls.group_by("op").agg(pl.col("self_ns").sum())
    own_ns = host["self_ns"].scatter(inside["op"], inside["self_ns"] + host["self_ns"].gather(inside["op"]))
    outer = inner.gather(host["parent"])
    is_inside = _is_inside_itself(host["name"].to_physical(), outer)
    total_ns = host["duration_ns"].zip_with(~is_inside, pl.zeros(1, pl.Int64, eager=True)).alias("total_ns")
    calls = host.select("name", own_ns.alias("own_ns"), total_ns).filter(is_op)
    by_name = calls.group_by("name").agg(
        pl.len().cast(pl.Int64).alias("num_calls"),
        pl.col("own_ns").sum().alias("host_self_ns"),
        pl.col("total_ns").sum().alias("host_total_ns"),
    )
    gpu = linked.device.group_by("op_name").agg(pl.col("duration_ns").sum().alias("device_self_ns"))
    under = _device_totals(linked, outer, is_inside)
    table = by_name.join(gpu, left_on="name", right_on="op_name", how="full", coalesce=True, nulls_equal=True).join(
        under, on="name", how="left", nulls_equal=True
    )
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
    inside = linked.host.filter(pl.col("module").is_not_null())
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


def _is_inside_itself(name: pl.Series, outer: pl.Series) -> pl.Series:
    """Return whether an event is inside an op of its own name; `outer` is the op around each."""
    row = outer.is_not_null().arg_true()
    above, found = outer.gather(row), [row.head(0)]
    while len(row):
        is_same = name.gather(above) == name.gather(row)
        found.append(row.filter(is_same))
        above = outer.gather(above)
        goes_on = ~is_same & above.is_not_null()
        row, above = row.filter(goes_on), above.filter(goes_on)
    return pl.repeat(False, len(name), dtype=pl.Boolean, eager=True).scatter(pl.concat(found), True)


def _device_totals(linked: Linked, outer: pl.Series, is_inside: pl.Series) -> pl.DataFrame:
    """Return the GPU work launched anywhere under an op's calls, by op."""
    host = linked.host
    work = linked.device.filter(pl.col("op").is_not_null()).group_by("op").agg(pl.col("duration_ns").sum())
    row, ns = work["op"], work["duration_ns"]
    sums = [pl.DataFrame(schema={"name": host.schema["name"], "device_total_ns": pl.Int64})]
    while len(row):
        level = pl.DataFrame({"name": host["name"].gather(row), "device_total_ns": ns})
        sums.append(level.filter(~is_inside.gather(row)).group_by("name").agg(pl.col("device_total_ns").sum()))
        above = outer.gather(row)
        row, ns = above.drop_nulls(), ns.filter(above.is_not_null())
    return pl.concat(sums).group_by("name").agg(pl.col("device_total_ns").sum())


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
