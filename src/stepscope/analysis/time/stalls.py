"""Host stalls: where the host launched nothing for long, what it did, and when no thread did anything visible."""

from itertools import pairwise
from typing import Any

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import matches, python_callers
from stepscope.analysis.structure.steps import at_times
from stepscope.analysis.time.idle_causes import CAUSES, PLANNING_NS, by_host
from stepscope.analysis.time.replay import Replay

STALL_NS = PLANNING_NS
MANY_OPS = 8  # from this many host-only ops on, the host is preparing something
KINDS = {
    "data": "It waited for a batch or prepared one, between the step's start and its forward.",
    **{name: CAUSES[name] for name in ("python", "compile", "allocator", "other_ranks", "launch")},
}
_SCHEMA = {
    "start_ns": pl.Int64(), "end_ns": pl.Int64(), "kind": pl.String(), "step": pl.Int64(), "phase": pl.String(),
    "op": pl.String(), "shapes": pl.String(), "num_ops": pl.Int64(), "most_op": pl.String(),
}  # fmt: skip
_SEEN = ["op", "runtime", "driver"]
_NODE = "^autograd::engine::evaluate_function"
_GRAPH_NS_PER_NODE = 2_000  # time to free a backward's graph per node on a slow host; most take half
_MIDDLE = ((pl.col("start_ns") + pl.col("end_ns")) // 2).alias("middle")


def stalls(linked: Linked, replay: Replay) -> pl.DataFrame:
    """Return stretches of a millisecond or more in which the host neither launched work nor waited for the GPU.

    `kind` is one of `KINDS`. `op` is the innermost op open in the middle, on the thread that continued, with its
    `shapes`; `num_ops` counts outermost ops within it on that thread, `most_op` is the longest.
    """
    host = linked.host
    found = replay.host_stretches().filter(pl.col("end_ns") - pl.col("start_ns") >= STALL_NS)
    found = with_threads(linked, found.with_row_index("gap"))
    found = found.with_columns(pl.col("thread").fill_null(pl.lit(linked.steps.main_thread, host.schema["thread"])))
    found = found.filter(pl.col("thread").is_not_null())  # a trace of GPU work alone shows no host
    pieces = by_host(linked, found)
    kinds = (
        pieces.group_by("gap", "cause")
        .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns"))
        .sort("ns", descending=True)
        .unique("gap", keep="first", maintain_order=True)
        .select("gap", pl.col("cause").cast(pl.String).alias("kind"))
    )
    placed = at_times(found.join(kinds, on="gap", how="left").with_columns(_MIDDLE), linked.steps, "middle")
    rows = []
    for row in placed.sort("start_ns").iter_rows(named=True):
        opened = _opened(host, row["thread"], row["middle"]).filter(pl.col("kind") == "op")
        op, shapes = opened.select("name", "shapes").row(-1) if opened.height else (None, None)
        num_ops, most_op = _ops_inside(host, row)
        kind = row["kind"] or "python"
        is_free = kind == "python" or (kind == "launch" and num_ops >= MANY_OPS)
        if is_free and (_is_before_forward(linked, row) or (num_ops >= MANY_OPS and _begins_forward(linked, row))):
            kind = "data"
        rows.append({**row, "kind": kind, "op": op, "shapes": shapes, "num_ops": num_ops, "most_op": most_op})
    return pl.DataFrame(rows, schema=_SCHEMA)


def with_threads(linked: Linked, stretches: pl.DataFrame) -> pl.DataFrame:
    """Return stretches with the `thread` of the call that ends each."""
    threads = linked.host.select(pl.col("event").alias("call"), "thread")
    threads = threads.filter(threads["call"].is_in(stretches["call"].implode()))
    return stretches.join(threads, on="call", how="left", maintain_order="left")


def _opened(host: pl.DataFrame, thread: int | None, time_ns: int) -> pl.DataFrame:
    """Return the events open on a thread at a time, the outermost first."""
    is_there = pl.col("thread") == pl.lit(thread, host.schema["thread"])
    return host.filter(is_there, pl.col("start_ns") <= time_ns, pl.col("end_ns") > time_ns)


def _is_before_forward(linked: Linked, stall: dict[str, Any]) -> bool:
    """Return whether no pass of the stall's step has begun and its forward comes next."""
    borders = linked.steps.table.filter(pl.col("step").eq_missing(pl.lit(stall["step"])))
    if stall["phase"] not in ("other", None) or borders.is_empty():
        return False
    begin, end = borders.select("start_ns", "end_ns").row(0)
    passes = linked.steps.phases.filter(
        pl.col("phase").is_in(["forward", "backward"]), pl.col("end_ns") > begin, pl.col("start_ns") < end
    )
    return passes.height > 0 and passes["phase"][0] == "forward" and passes["start_ns"][0] > stall["middle"]


def _begins_forward(linked: Linked, stall: dict[str, Any]) -> bool:
    """Return whether the stall is in an unlabeled forward before its first launch."""
    if stall["phase"] != "forward" or not linked.steps.is_forward_found:
        return False
    middle = stall["middle"]
    around = linked.steps.phases.filter(pl.col("start_ns") <= middle, pl.col("end_ns") > middle)
    given = linked.device["launch_start_ns"]
    return not ((given >= int(around["start_ns"][0])) & (given < middle)).any()


def _ops_inside(host: pl.DataFrame, stall: dict[str, Any]) -> tuple[int, str | None]:
    """Return the number of outermost ops in a stall on its thread, and the name with most time."""
    ops = host.filter(
        host["kind"] == "op", host["thread"] == stall["thread"], host["start_ns"] >= stall["start_ns"],
        host["end_ns"] <= stall["end_ns"],
    )  # fmt: skip
    is_outer = ~(host["kind"].gather(ops["parent"]) == "op").fill_null(False)
    times = ops.filter(is_outer).group_by(pl.col("name").cast(pl.String)).agg(pl.len(), pl.col("duration_ns").sum())
    if times.is_empty():
        return 0, None
    most = times.sort("duration_ns", "name", descending=[True, False])["name"][0]
    return int(times["len"].sum()), str(most)


def quiet_stretches(linked: Linked, stalls: pl.DataFrame) -> pl.DataFrame:
    """Return parts of stalls (1 ms or longer) with at most one op open in which nothing, not even a phase, begins or
    ends.

    Accumulating gradients or freeing hundreds of tensors is work; so is freeing a backward's graph right after it.
    Sleep, files, network, garbage collection and pure Python loops are quiet.
    """
    host = linked.host
    is_seen = host["kind"].is_in(_SEEN)
    nodes = host.filter(matches(host["name"], _NODE))
    borders = pl.concat([linked.steps.phases[end] for end in ("start_ns", "end_ns")])
    num_nodes = dict(nodes.group_by("step").len().iter_rows())
    rows: list[tuple[object, ...]] = []
    for stall in stalls.iter_rows(named=True):
        start, end = stall["start_ns"], stall["end_ns"]
        near = is_seen & (host["end_ns"] > start) & (host["start_ns"] < end)
        moments = pl.concat(
            [
                host["start_ns"].filter(near),
                host["end_ns"].filter(near),
                linked.memory.filter(pl.col("time_ns") > start, pl.col("time_ns") < end)["time_ns"],
                borders.filter((borders > start) & (borders < end)),
                pl.Series([start, end], dtype=pl.Int64),
            ]
        )
        times = moments.clip(start, end).unique().sort().to_list()
        for begin, until in pairwise(times):
            is_graph = until - begin <= _GRAPH_NS_PER_NODE * num_nodes.get(stall["step"], 0)
            if until - begin >= STALL_NS and not (is_graph and _frees_graph(linked, is_seen, begin, until)):
                rows.append((begin, until, *_doing(linked, (begin + until) // 2)))
    columns = {"start_ns": pl.Int64(), "end_ns": pl.Int64(), "op": pl.String(), "caller": pl.String()}
    found = pl.DataFrame(rows, schema=columns, orient="row").with_columns(_MIDDLE)
    phase = pl.col("phase").cast(pl.String)
    return at_times(found, linked.steps, "middle").select("start_ns", "end_ns", "step", phase, "op", "caller")


def _frees_graph(linked: Linked, is_seen: pl.Series, start_ns: int, end_ns: int) -> bool:
    """Return whether a backward is the last event before a stretch and freeing a tensor ends it, if the trace shows
    frees."""
    before = linked.host.select("name", "end_ns").filter(is_seen & (linked.host["end_ns"] <= start_ns))
    last = before["name"].filter(before["end_ns"] == before["end_ns"].max()).tail(1)
    if last.is_empty() or not matches(last, _NODE)[0]:
        return False
    memory = linked.memory
    return memory.is_empty() or bool(((memory["time_ns"] == end_ns) & (memory["bytes"] < 0)).any())


def _doing(linked: Linked, time_ns: int) -> tuple[str | None, str | None]:
    """Return the innermost op open on the main thread, and the user's function."""
    opened = _opened(linked.host, linked.steps.main_thread, time_ns)
    ops = opened.filter(pl.col("kind") == "op")
    caller = python_callers(linked.host, opened["row"].tail(1))[0] if opened.height else None
    return (str(ops["name"][-1]) if ops.height else None), caller
