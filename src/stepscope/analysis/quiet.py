"""When no thread of the program did anything that a profiler sees."""

from __future__ import annotations

from itertools import pairwise

import polars as pl

from stepscope.analysis.callers import python_callers
from stepscope.analysis.links import Linked
from stepscope.analysis.stalls import STALL_NS

_SEEN = ["op", "runtime", "driver"]
_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64(), "end_ns": pl.Int64(), "step": pl.Int64(), "phase": pl.String(), "op": pl.String(),
        "caller": pl.String(),
    }
)  # fmt: skip


def quiet_stretches(linked: Linked, stalls: pl.DataFrame) -> pl.DataFrame:
    """The parts of stalls, a millisecond and longer, in which one op was open or none, and nothing began or ended:
    `start_ns`, `end_ns`, `step`, `phase`, `op`, `caller`.

    A stall may be the end of a backward that only accumulates, or hundreds of tensors given back: that is work.
    Sleep, a file, a network, the garbage collector and a loop in pure Python are quiet.
    """
    host = linked.host
    is_seen = host["kind"].is_in(_SEEN)
    rows: list[tuple[object, ...]] = []
    for stall in stalls.iter_rows(named=True):
        start, end = stall["start_ns"], stall["end_ns"]
        near = is_seen & (host["end_ns"] > start) & (host["start_ns"] < end)
        moments = pl.concat(
            [
                host["start_ns"].filter(near),
                host["end_ns"].filter(near),
                linked.memory.filter(pl.col("time_ns") > start, pl.col("time_ns") < end)["time_ns"],
                pl.Series([start, end], dtype=pl.Int64),
            ]
        )
        times = moments.clip(start, end).unique().sort().to_list()
        for begin, until in pairwise(times):
            if until - begin >= STALL_NS:
                rows.append((begin, until, stall["step"], stall["phase"], *_inside(linked, (begin + until) // 2)))
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _inside(linked: Linked, time_ns: int) -> tuple[str | None, str | None]:
    """The innermost op open on the main thread, and the user's function."""
    host = linked.host
    is_open = (host["start_ns"] <= time_ns) & (host["end_ns"] > time_ns)
    opened = host.filter(is_open & (host["thread"] == linked.steps.main_thread).fill_null(False))
    if opened.is_empty():
        return None, None
    ops = opened.filter(pl.col("kind") == "op")
    return (str(ops["name"][-1]) if ops.height else None), python_callers(host, opened["row"].tail(1))[0]
