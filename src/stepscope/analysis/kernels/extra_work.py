"""GPU work that training does not need: NaN checks whose result the program reads, and recomputed forwards."""

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor, is_aten_op, is_named, matches, outermost

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
    columns = ("row", "name", "thread", "start_ns", "end_ns", "step", "phase", "module")
    outer = host.select(columns).filter(is_aten & ~is_inside).sort("thread", "start_ns", "row")
    reading = is_named(outer, _READING).arg_true()
    back = [(place, max(0, place - distance)) for place in reading for distance in range(_MOST_BETWEEN + 2)]
    near = outer.select("row", "thread", is_named(outer, _TESTING).alias("tests"), is_named(outer, _REDUCING))
    tests: dict[int, int | None] = {}
    thread, is_open = None, False
    for (place, at), (row, its_thread, is_test, is_reduction) in zip(back, near[[at for _, at in back]].rows()):
        if place not in tests:
            tests[place], thread, is_open = None, its_thread, True
        elif is_open and at < place and its_thread == thread:
            tests[place], is_open = (row, False) if is_test else (None, bool(is_reduction))
        else:
            is_open = False
    checks = outer[reading].with_columns(test=pl.Series([*tests.values()], dtype=pl.UInt32)).drop_nulls("test")
    above = host["name"].gather(host["parent"].gather(checks["test"]))
    checks = checks.select(
        host["start_ns"].gather(checks["test"]).alias("start_ns"), "end_ns", "thread", "step", "phase", "module",
        matches(above, _AUTOGRAD).alias("is_autograd"),
    ).sort("thread", "start_ns")  # fmt: skip
    device = device if checks.height else device.head(0)
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


def recomputed(linked: Linked, work: pl.DataFrame) -> pl.DataFrame:
    """Return outermost ops that ran again inside the backward, by time, with their GPU work in `events`.

    `from_ns` to `until_ns` is the time that the autograd node around an op spends on running its forward again: until
    the node's next other work, an op or a nested node.

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
    table = (
        host.join(done, left_on="row", right_on="top", maintain_order="left", suffix="_done")
        .join(taken, left_on="row", right_on="top", how="left", maintain_order="left")
        .select(
            "row", pl.col("name").cast(pl.String), "start_ns", "end_ns", pl.col("allocated_bytes").fill_null(0),
            "events", pl.col("duration_ns_done").alias("duration_ns"),
        )
    )  # fmt: skip
    return _within_nodes(linked, table, top_of["row"])


def _within_nodes(linked: Linked, again: pl.DataFrame, inner: pl.Series) -> pl.DataFrame:
    """Return recomputed ops with `from_ns` and `until_ns`; `inner` are the rows of all ops in them."""
    host, is_node = linked.host, _is_node(linked.host)
    launching = host["row"].is_in(linked.device["op"].drop_nulls().implode())
    others = host.filter((launching & ~host["row"].is_in(inner.implode())) | is_node)
    others = others.select("thread", "start_ns", pl.col("start_ns").alias("other_ns")).sort("start_ns")
    nodes = ancestor(host, is_node).gather(again["row"])
    placed = again.with_columns(
        host["thread"].gather(again["row"]).alias("thread"),
        host["start_ns"].gather(nodes).alias("begin_ns"),
        host["end_ns"].gather(nodes).alias("finish_ns"),
    )
    before, after = (
        placed.select("thread", "start_ns").join_asof(
            others, on="start_ns", by="thread", strategy=strategy, check_sortedness=False
        )["other_ns"]
        for strategy in ("backward", "forward")
    )  # fmt: skip
    # A node that did other work before may have spent the time since on that.
    from_ns = pl.when(before <= pl.col("begin_ns")).then("begin_ns").otherwise("start_ns")
    until_ns = pl.min_horizontal("finish_ns", after)
    return placed.select(*again.columns, from_ns.alias("from_ns"), until_ns.alias("until_ns"))


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
