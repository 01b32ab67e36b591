"""NaN and infinity checks whose result the program reads: their GPU work, and whether autograd makes them."""

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import is_aten_op, outermost

_TESTING = ["aten::isnan", "aten::isfinite", "aten::isinf"]
_REDUCING = [
    "aten::any", "aten::all", "aten::_is_any_true", "aten::_is_all_true", "aten::logical_not", "aten::bitwise_not",
    "aten::logical_or", "aten::bitwise_or", "aten::sum",
]  # fmt: skip
_READING = ["aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"]
_MOST_BETWEEN = 3
_STACK_NS, _USUAL_NS = 80_000, 20_000  # host time of an op that records a stack trace (at least), and of a typical op
_AUTOGRAD = "^autograd::engine::evaluate_function"


def nan_checks(linked: Linked) -> pl.DataFrame:
    """Return NaN checks by time, from the test (`start_ns`) to the op that reads its result (`end_ns`).

    `is_autograd` marks checks by the engine, as under `detect_anomaly`; `events` is their GPU work.
    """
    host, device = linked.host, linked.device
    is_aten = is_aten_op(host)
    is_inside = is_aten.gather(host["parent"]).fill_null(False)
    outer = host.filter(is_aten & ~is_inside).sort("thread", "start_ns", "row")
    name = pl.col("name").cast(pl.String)
    test: pl.Expr = pl.lit(None, pl.UInt32)
    is_open = pl.lit(True)
    for distance in range(1, _MOST_BETWEEN + 2):
        before = name.shift(distance).over("thread")
        found = is_open & before.is_in(_TESTING)
        test = pl.when(test.is_null() & found).then(pl.col("row").shift(distance).over("thread")).otherwise(test)
        is_open = is_open & before.is_in(_REDUCING)
    checks = outer.with_columns(test.alias("test")).filter(name.is_in(_READING), pl.col("test").is_not_null())
    above = host["name"].gather(host["parent"].gather(checks["test"]))
    checks = checks.select(
        host["start_ns"].gather(checks["test"]).alias("start_ns"), "end_ns", "thread", "step", "phase", "module",
        matches(above, _AUTOGRAD).alias("is_autograd"),
    ).sort("thread", "start_ns")  # fmt: skip
    rows = outermost(host, device["op"], is_aten)
    work = device.select("event", host["thread"].gather(rows), host["start_ns"].gather(rows).alias("time"))
    checks = checks.with_row_index("check")
    borders = checks.select("check", "thread", pl.col("start_ns").alias("time"), "end_ns").sort("time")
    owned = work.drop_nulls().sort("time").join_asof(borders, on="time", by="thread", check_sortedness=False)
    owned = owned.filter(pl.col("time") < pl.col("end_ns")).group_by("check").agg(pl.col("event").alias("events"))
    return checks.join(owned, on="check", how="left").drop("check", "thread").sort("start_ns")


def stack_writing_ops(linked: Linked) -> pl.DataFrame:
    """Return forward ops so slow that they record a stack trace for `detect_anomaly`; inner ops are excluded.

    `start_ns`, `end_ns`, and the `factor` of it that a typical op takes.
    """
    host = linked.host
    is_slow = (host["kind"] == "op") & (host["sequence"] >= 0) & (host["self_ns"] >= _STACK_NS)
    slow = host.filter(is_slow.fill_null(False) & (host["phase"].cast(pl.String) == "forward").fill_null(False))
    rows: list[list[int]] = []
    for start, end, own in slow.sort("start_ns", "row").select("start_ns", "end_ns", "self_ns").iter_rows():
        if rows and start < rows[-1][1]:
            rows[-1][2] += own - _USUAL_NS
        else:
            rows.append([start, end, own - _USUAL_NS])
    table = pl.DataFrame(rows, schema=dict.fromkeys(("start_ns", "end_ns", "excess_ns"), pl.Int64), orient="row")
    left = 1 - pl.col("excess_ns") / (pl.col("end_ns") - pl.col("start_ns"))
    return table.select("start_ns", "end_ns", left.clip(0, 1).alias("factor"))
