"""Every synchronization of a trace: duration, what it waited for, and GPU idle time after it."""

import re

import polars as pl

from stepscope.analysis.kernels.copies import direction
from stepscope.analysis.structure.intervals import covered_before, spans, union
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import is_aten_op, matches, outermost, with_answers
from stepscope.analysis.structure.once import once

KINDS = {
    "host_wait": "The host waited for the device.",
    "stream_wait": "A stream waits for another; the host continues.",
    "query": "The host checked whether the device was done, without waiting.",
}

# Names of calls, tried in this order. A copy that is not asynchronous by name waits, unless it stays on the device.
_CALLS = {
    "stream_wait": r"(?i)StreamWait(Event|Value)",
    "host_wait": r"(?i)synchronize",
    "waiting_copy": r"^(cuda|hip|cu)Memcpy(2D|3D)?((To|From)(Symbol|Array)|DtoH|HtoD|WithStream)?(_\w+)?$",
    "copy": r"(?i)memcpy",
}
_COLUMNS = (
    "event", "kind", "call", "thread", "op", "outer_op", "module", "step", "phase", "start_ns", "duration_ns",
    "busy_ns", "stream", "wait_on_stream", "waited_for", "waited_for_stream", "wait_ns", "idle_after_ns",
)  # fmt: skip
_HOST_WAIT_BY_DRIVER = r"(?i)(stream|context|event) sync"


@once
def syncs(linked: Linked) -> pl.DataFrame:
    """Return every synchronization, by time.

    `kind` is one of `KINDS`, `call` the runtime's name, `op` the innermost op around it, `outer_op` the outermost
    framework op (`aten::item` around `aten::_local_scalar_dense`). `busy_ns` is GPU busy time during it. `waited_for`
    and `waited_for_stream`: the GPU event that ended last before the call returned, on the stream waited for if
    known. `wait_ns` is the wait until then, `idle_after_ns` GPU idle time after it until the next work or
    synchronization; no idle time counts twice.
    """
    calls = _with_driver(linked, _host_calls(linked))
    busy = union(spans(linked.device))
    ends = calls["start_ns"] + calls["duration_ns"]
    calls = calls.with_columns(
        (covered_before(busy, ends) - covered_before(busy, calls["start_ns"])).alias("busy_ns"),
        _idle_after(busy, calls),
    )
    waits = pl.concat([_host_waits(linked, calls), _stream_waits(linked, calls)], how="diagonal_relaxed")
    return calls.join(waits, on="event", how="left").sort("start_ns", "event").select(_COLUMNS)


def syncs_summary(syncs: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return synchronizations by `kind`, `call` and `op` (the outer one), most idle time after them first.

    `waited_for` is the most frequent GPU event. Sums match the table's.
    """
    return (
        syncs.group_by("kind", "call", pl.col("outer_op").alias("op"), maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("num_calls"),
            pl.col("duration_ns").sum().alias("total_ns"),
            pl.col("busy_ns", "wait_ns", "idle_after_ns").sum(),
            pl.col("waited_for").drop_nulls().mode(maintain_order=True).first(),
        )
        .with_columns(
            (pl.col("num_calls") / num_steps if num_steps else pl.lit(None, pl.Float64)).alias("num_calls_per_step")
        )
        .sort("idle_after_ns", "total_ns", descending=True, maintain_order=True)
    )


def _host_calls(linked: Linked) -> pl.DataFrame:
    """Return host calls that synchronize or that the driver reported, with `wait_on_stream` if known."""
    host = linked.host
    is_reported = (pl.col("correlation") > 0) & pl.col("correlation").is_in(
        linked.trace.syncs["correlation"].drop_nulls().implode()
    )
    # Only columns that are needed, of rows that are: calls may be most events of a trace.
    calls = host.select(
        *("row", "event", "name", "thread", "op", "module", "step", "phase"),
        *("start_ns", "duration_ns", "end_ns", "correlation"),
    )
    is_call = host["kind"].is_in(["runtime", "driver"])
    calls = calls.filter(is_call & (matches(host["name"], "|".join(_CALLS.values())) | is_reported))
    calls = with_answers(calls, ["name"], _sort, {"sort": pl.String()})
    calls = calls.join(_copies(linked), on="row", how="left", maintain_order="left")
    is_copy = pl.col("sort").is_in(["waiting_copy", "copy"])
    # The driver makes the host wait for copies to pageable memory, and from it unless they fit into a small buffer.
    waits_for_pageable = pl.col("pageable") & (
        (pl.col("what") == "device_to_host") | (pl.col("end_ns") > pl.col("copy_start_ns"))
    )
    stays = (pl.col("what") == "device_to_device") & ~pl.col("name").cast(pl.String).str.contains("WithStream")
    is_waiting = (pl.col("sort") == "waiting_copy") & ~stays.fill_null(False)
    is_reported = is_reported.fill_null(False)
    calls = calls.filter(~is_copy.fill_null(False) | is_waiting | waits_for_pageable.fill_null(False) | is_reported)
    ops = linked.device.filter(pl.col("op").is_in(calls["op"].drop_nulls().implode()))
    streams = ops.group_by("op").agg(pl.col("stream").last().alias("op_stream"))
    calls = calls.join(streams, on="op", how="left", maintain_order="left")
    is_stream = (pl.col("sort") == "host_wait") & pl.col("name").cast(pl.String).str.contains("(?i)stream")
    return calls.select(
        "event",
        # Reports without a matching rule are queries, which the driver reports too.
        pl.when(is_copy).then(pl.lit("host_wait")).otherwise(pl.col("sort").fill_null("query")).alias("kind"),
        pl.col("name").alias("call"),
        "thread",
        host["name"].gather(calls["op"]).alias("op"),
        host["name"].gather(outermost(host, calls["op"], is_aten_op(host))).alias("outer_op"),
        *("module", "step", "phase", "start_ns", "duration_ns", "correlation"),
        pl.when(is_copy).then("copy_stream").when(is_stream).then("op_stream").alias("wait_on_stream"),
        *("copy_name", "copy_end_ns"),
    )


def _sort(name: str | None) -> tuple[str | None]:
    return (next((sort for sort, pattern in _CALLS.items() if re.search(pattern, name or "")), None),)


def _copies(linked: Linked) -> pl.DataFrame:
    """Return the memcpy of each call: `row` of the call, `what`, `pageable`, and its kind as `copy_…`."""
    made = linked.device.filter(pl.col("kind") == "memcpy", pl.col("launch").is_not_null())
    made = made.unique("launch", keep="first", maintain_order=True)
    facts = pl.col("name", "stream", "start_ns", "end_ns").name.prefix("copy_")
    named = with_answers(made, ["name", "op_name"], direction, {"what": pl.String(), "pageable": pl.Boolean()})
    return named.select(pl.col("launch").alias("row"), "what", "pageable", facts)


def _with_driver(linked: Linked, calls: pl.DataFrame) -> pl.DataFrame:
    """Return calls with the streams reported by the driver, plus a row per report without a call."""
    reports = linked.trace.syncs.select(
        "event", "name", "device", "start_ns", "duration_ns", "wait_on_correlation",
        pl.when(pl.col("correlation") > 0).then("correlation").alias("correlation"),
        pl.when(pl.col("stream") >= 0).then("stream").alias("stream"),
        pl.when(pl.col("wait_on_stream") >= 0).then("wait_on_stream").alias("reported_stream"),
    )  # fmt: skip
    streams = reports.select("correlation", "device", "stream", "reported_stream", "wait_on_correlation")
    streams = streams.unique("correlation", keep="first", maintain_order=True)
    calls = calls.join(streams, on="correlation", how="left", maintain_order="left").with_columns(
        pl.coalesce("reported_stream", "wait_on_stream").alias("wait_on_stream")
    )
    is_host = pl.col("name").cast(pl.String).str.contains(_HOST_WAIT_BY_DRIVER)
    alone = reports.join(calls, on="correlation", how="anti").select(
        "event", pl.when(is_host).then(pl.lit("host_wait")).otherwise(pl.lit("stream_wait")).alias("kind"),
        pl.col("name").alias("call"), "start_ns", "duration_ns", "device", "stream",
        pl.col("reported_stream").alias("wait_on_stream"), "wait_on_correlation",
    )  # fmt: skip
    return pl.concat([calls, alone], how="diagonal_relaxed").cast({"kind": pl.Enum(list(KINDS))})


def _idle_after(busy: pl.DataFrame, calls: pl.DataFrame) -> pl.Series:
    """Return each host wait's part of the idle stretch that it ended in; waits in one stretch divide it."""
    if busy.is_empty():
        return pl.repeat(None, calls.height, dtype=pl.Int64, eager=True).alias("idle_after_ns")
    gaps = pl.DataFrame({"gap_ns": busy["end_ns"].head(-1), "until_ns": busy["start_ns"].tail(-1)})
    ended = calls.select("kind", "start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns")).with_row_index("call")
    begin = pl.max_horizontal("start_ns", "gap_ns").alias("begin")
    next_begin = pl.when(pl.col("gap_ns") == pl.col("gap_ns").shift(-1)).then(pl.col("begin").shift(-1))
    idle_ns = pl.coalesce(next_begin, "until_ns") - pl.col("begin")
    pieces = (
        ended.filter(pl.col("kind") == "host_wait")
        .sort("end_ns")
        .join_asof(gaps, left_on="end_ns", right_on="gap_ns", coalesce=False, check_sortedness=False)
        .with_columns(begin)
        .sort("gap_ns", "begin", "start_ns", "call")
        .filter(pl.col("end_ns") < pl.col("until_ns"))
        .select("call", idle_ns.alias("idle_after_ns"))
    )
    idle = ended.join(pieces, on="call", how="left", maintain_order="left")
    of_waits = pl.when(pl.col("kind") == "host_wait").then(pl.col("idle_after_ns").fill_null(0))
    return idle.select(of_waits.alias("idle_after_ns"))["idle_after_ns"]


def _host_waits(linked: Linked, calls: pl.DataFrame) -> pl.DataFrame:
    """Return what each host wait waited for, by `event`: a copy for itself, others for what ended last."""
    until, stream = pl.col("end_ns").alias("until_ns"), pl.col("stream").alias("waited_for_stream")
    ended = linked.device.select(pl.col("name").alias("waited_for"), "stream", stream, "end_ns", until).sort("end_ns")
    waiting = calls.filter(pl.col("kind") == "host_wait").with_columns(
        (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"), pl.col("wait_on_stream").alias("stream")
    )
    is_copy, is_known = pl.col("copy_name").is_not_null(), pl.col("stream").is_not_null()
    columns = ("event", "start_ns", "end_ns", "waited_for", "waited_for_stream", "until_ns")
    copies = waiting.filter(is_copy).with_columns(
        pl.col("copy_name").alias("waited_for"), stream, pl.col("copy_end_ns").alias("until_ns")
    )
    of_stream = waiting.filter(~is_copy, is_known).sort("end_ns")
    of_stream = of_stream.join_asof(ended, on="end_ns", by="stream", check_sortedness=False)
    of_any = waiting.filter(~is_copy, ~is_known).sort("end_ns")
    of_any = of_any.join_asof(ended.drop("stream"), on="end_ns", check_sortedness=False)
    found = pl.concat([part.select(columns) for part in (copies, of_stream, of_any)], how="vertical_relaxed")
    stood = pl.col("until_ns").clip(pl.col("start_ns"), pl.col("end_ns")) - pl.col("start_ns")
    return found.select("event", "waited_for", "waited_for_stream", stood.alias("wait_ns"))


def _stream_waits(linked: Linked, calls: pl.DataFrame) -> pl.DataFrame:
    """Return what each waiting stream waited for, by `event`: the last work on the other stream before the event was
    recorded. It waits from the end of its own last work, or from the call."""
    records = linked.host.select(
        "kind", pl.col("correlation").alias("wait_on_correlation"), pl.col("start_ns").alias("recorded_ns")
    ).filter(
        pl.col("kind").is_in(["runtime", "driver"]),
        pl.col("wait_on_correlation").is_in(calls["wait_on_correlation"].drop_nulls().implode()),
    )
    waiting = (
        calls.filter(pl.col("kind") == "stream_wait", pl.col("wait_on_stream").is_not_null())
        .select("event", "device", "stream", "wait_on_stream", "wait_on_correlation", "start_ns")
        .join(records.drop("kind").unique("wait_on_correlation"), on="wait_on_correlation")
    )
    work = linked.device.select("device", "stream", "issued_ns", "name", "end_ns").filter(waiting.height > 0)
    work = work.sort("issued_ns")
    other = work.rename({"stream": "wait_on_stream", "name": "waited_for", "end_ns": "until_ns"})
    own = work.select("device", "stream", "issued_ns", pl.col("end_ns").alias("own_end_ns"))
    found = waiting.sort("recorded_ns").join_asof(
        other, left_on="recorded_ns", right_on="issued_ns", by=["device", "wait_on_stream"], check_sortedness=False
    )
    found = found.sort("start_ns").join_asof(
        own, left_on="start_ns", right_on="issued_ns", by=["device", "stream"], check_sortedness=False
    )
    stream = pl.when(pl.col("waited_for").is_not_null()).then("wait_on_stream").alias("waited_for_stream")
    stood = (pl.col("until_ns") - pl.max_horizontal("start_ns", "own_end_ns")).clip(0).alias("wait_ns")
    return found.select("event", "waited_for", stream, stood)
