"""Where the host waits for the GPU: calls with their callers and copies, counted masks, tensors that come back."""

from bisect import bisect_left

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import is_aten_op, matches, outermost, python_callers
from stepscope.analysis.time.syncs import syncs

_REDUCING = (
    r"^aten::(norm|linalg_(vector_)?norm|sum|nansum|mean|max|min|amax|amin|std|var|abs|square|pow|sqrt|prod|dot|argmax"
    r"|eq|ne|detach|alias|view|flatten|select|float)$"
)
_MOST_FEEDING = 4
_COUNTING = "^aten::nonzero$"
_CHOOSING = r"^aten::(index|index_put_?|_index_put_impl_|masked_select)$"


def waits(linked: Linked, copies: pl.DataFrame) -> pl.DataFrame:
    """Return host waits of the launching threads, by time: the columns of `syncs`, and more.

    `caller`: the Python function, if the trace has stacks. `copy`: the `event` of the op's last memcpy, with `what`,
    `bytes` and `pageable` as in `copies`. `stop`: a number shared by the waits of one op call. `is_closing`: the step
    (or trace) launches no kernel after it; `is_opening`: nor before it. `fed_by`: GPU work of the one to four
    reducing ops that only computed the value it read.
    """
    host, device = linked.host, linked.device
    kernels = device.filter(pl.col("kind") == "kernel", pl.col("launch").is_not_null())
    launching = host["thread"].gather(kernels["launch"]).unique()
    made = syncs(linked).filter(pl.col("kind") == "host_wait", pl.col("thread").is_in(launching.implode()))
    calls = host.select("event", "row", pl.col("op").alias("op_row"))
    made = made.join(calls.filter(calls["event"].is_in(made["event"].implode())), on="event", how="left")
    copied = device.filter(pl.col("kind") == "memcpy").join(
        copies.select("event", "what", "bytes", "pageable"), on="event", suffix="_moved"
    )
    facts = [pl.col("event").alias("copy"), pl.col("what", "pageable"), pl.col("bytes_moved").alias("bytes")]
    by_call = copied.filter(pl.col("launch").is_not_null()).unique("launch", keep="last", maintain_order=True)
    by_op = copied.filter(pl.col("op").is_not_null()).unique("op", keep="last", maintain_order=True)
    made = made.join(by_call.select(pl.col("launch").alias("row"), *facts), on="row", how="left")
    made = made.join(by_op.select(pl.col("op").alias("op_row"), *facts), on="op_row", how="left", suffix="_op")
    both = [pl.coalesce(name, f"{name}_op").alias(name) for name in ("copy", "what", "bytes", "pageable")]
    last = kernels.group_by("step").agg(pl.col("issued_ns").max().alias("last_ns"))
    made = made.with_columns(both).join(last, on="step", how="left", nulls_equal=True)
    is_closing = (pl.col("start_ns") >= pl.col("last_ns")).fill_null(True).alias("is_closing")
    first = pl.lit(kernels["issued_ns"].min(), pl.Int64)
    is_opening = (pl.col("start_ns") < first).fill_null(False).alias("is_opening")
    made = made.sort("start_ns", "event")
    stop = pl.coalesce("op_row", "row").alias("stop")
    made = made.join(_fed_by(linked, made), on="event", how="left", maintain_order="left")
    return made.with_columns(is_closing, is_opening, stop, python_callers(host, made["row"])).drop(
        "row", "op_row", "last_ns", *(f"{name}_op" for name in ("copy", "what", "bytes", "pageable"))
    )


def _fed_by(linked: Linked, made: pl.DataFrame) -> pl.DataFrame:
    """Return `event` of each wait that follows a few reducing ops, and `fed_by`."""
    host, device = linked.host, linked.device
    is_aten = is_aten_op(host)
    reading = made.select("event", outermost(host, made["op_row"], is_aten).alias("row")).drop_nulls()
    reading = reading.unique("row", keep="first", maintain_order=True)
    outer = host.filter(is_aten & ~is_aten.gather(host["parent"]).fill_null(False)).sort("thread", "start_ns", "row")
    outer = outer.select("row", "thread", matches(outer["name"], _REDUCING).alias("is_reducing"))
    outer = outer.join(reading, on="row", how="left", maintain_order="left")
    # The ops up to each read, and the read, share a number.
    number = pl.col("event").is_not_null().shift(1, fill_value=False).cum_sum().over("thread")
    groups = outer.with_columns(number.alias("group")).group_by("thread", "group", maintain_order=True)
    fed = groups.agg(
        pl.col("event").last(), pl.col("row").head(pl.len() - 1), pl.col("is_reducing").head(pl.len() - 1).all()
    )
    num_before = pl.col("row").list.len()
    fed = fed.filter(pl.col("event").is_not_null(), "is_reducing", num_before > 0, num_before <= _MOST_FEEDING)
    work = device.select(pl.col("event").alias("work"), outermost(host, device["op"], is_aten).alias("row"))
    fed = fed.select("event", "row").explode("row").join(work, on="row")
    return fed.group_by("event").agg(pl.col("work").alias("fed_by"))


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


_LEAST_BYTES = 256  # smaller copies are single values, whose sizes match by chance
_MOST_KERNELS = 8  # with more kernels launched in between, the copies are probably unrelated
_SCHEMA = {
    "start_ns": pl.Int64(), "end_ns": pl.Int64(), "out": pl.Int64(), "back": pl.Int64(), "bytes": pl.Int64(),
    "num_kernels": pl.Int64(), "step": pl.Int64(), "phase": pl.String(), "module": pl.String(),
    "caller": pl.String(), "op": pl.String(),
}  # fmt: skip


def round_trips(linked: Linked, copies: pl.DataFrame) -> pl.DataFrame:
    """Return pairs of a copy to the host and the next copy of the same size back, in one phase of a step.

    `start_ns`, `end_ns`: on the host, from the start of the first op to the end of the second. `out` and `back` are
    the copies' `event`s, `num_kernels` counts launches in between; the rest describes the first copy.
    """
    host, device = linked.host, linked.device
    made = device.filter(pl.col("kind") == "memcpy", pl.col("launch").is_not_null(), pl.col("bytes") >= _LEAST_BYTES)
    made = made.join(copies.select("event", "what"), on="event").sort("issued_ns")
    outer = outermost(host, made["op"].zip_with(made["op"].is_not_null(), made["launch"]), is_aten_op(host))
    made = made.select(
        "event", "what", "bytes", "step", "phase", "module", "issued_ns", pl.col("op_name").alias("op"),
        host["start_ns"].gather(outer), host["end_ns"].gather(outer), python_callers(host, made["launch"]),
    )  # fmt: skip
    launched = device.filter(pl.col("kind") == "kernel")["issued_ns"].sort().to_list()
    taken: dict[tuple[object, ...], list[dict[str, object]]] = {}
    rows = []
    for copy in made.iter_rows(named=True):
        key = (copy["bytes"], copy["step"], copy["phase"])
        if copy["what"] == "device_to_host":
            taken.setdefault(key, []).append(copy)
        elif copy["what"] == "host_to_device" and taken.get(key):
            out = taken[key].pop()
            between = bisect_left(launched, copy["issued_ns"]) - bisect_left(launched, out["issued_ns"])
            if between <= _MOST_KERNELS:
                pair = {"end_ns": copy["end_ns"], "out": out["event"], "back": copy["event"], "num_kernels": between}
                rows.append({**out, **pair})
    return pl.DataFrame(rows, schema=_SCHEMA)
