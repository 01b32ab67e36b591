"""Stretches in which no thread did anything visible to the profiler."""

from __future__ import annotations

from itertools import pairwise

import polars as pl

from stepscope.analysis.structure.callers import python_callers
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.steps import at_times
from stepscope.analysis.time.stalls import STALL_NS

_SEEN = ["op", "runtime", "driver"]
_NODE = "^autograd::engine::evaluate_function"
_GRAPH_NS_PER_NODE = 2_000  # time to free a backward's graph per node on a slow host; most take half
_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64(), "end_ns": pl.Int64(), "step": pl.Int64(), "phase": pl.String(), "op": pl.String(),
        "caller": pl.String(),
    }
)  # fmt: skip


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
            if until - begin >= STALL_NS and not (is_graph and _frees_graph(linked, begin, until)):
                rows.append((begin, until, *_inside(linked, (begin + until) // 2)))
    columns = {name: _SCHEMA[name] for name in ("start_ns", "end_ns", "op", "caller")}
    found = pl.DataFrame(rows, schema=columns, orient="row")
    middle = ((pl.col("start_ns") + pl.col("end_ns")) // 2).alias("middle")
    return at_times(found.with_columns(middle), linked.steps, "middle").select(_SCHEMA.names()).cast(_SCHEMA)


def _frees_graph(linked: Linked, start_ns: int, end_ns: int) -> bool:
    """Return whether a backward is the last event before a stretch and freeing a tensor ends it, if the trace shows
    frees."""
    host = linked.host
    before = host.filter(pl.col("kind").is_in(_SEEN), pl.col("end_ns") <= start_ns)
    if before.is_empty() or not matches(before.sort("end_ns")["name"].tail(1), _NODE)[0]:
        return False
    released = linked.memory.filter(pl.col("bytes") < 0)["time_ns"]
    return linked.memory.is_empty() or bool((released == end_ns).any())


def _inside(linked: Linked, time_ns: int) -> tuple[str | None, str | None]:
    """Return the innermost op open on the main thread, and the user's function."""
    host = linked.host
    is_open = (host["start_ns"] <= time_ns) & (host["end_ns"] > time_ns)
    opened = host.filter(is_open & (host["thread"] == linked.steps.main_thread).fill_null(False))
    if opened.is_empty():
        return None, None
    ops = opened.filter(pl.col("kind") == "op")
    return (str(ops["name"][-1]) if ops.height else None), python_callers(host, opened["row"].tail(1))[0]
