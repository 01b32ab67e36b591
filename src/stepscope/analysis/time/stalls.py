"""Host stalls: where the host launched nothing for long, and what it did."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.steps import at_times
from stepscope.analysis.time.idle import CAUSES, PLANNING_NS, by_host
from stepscope.analysis.time.replay import Replay

STALL_NS = PLANNING_NS
MANY_OPS = 8  # from this many host-only ops on, the host is preparing something
KINDS = {
    "data": "It waited for a batch or prepared one, between the step's start and its forward.",
    **{name: CAUSES[name] for name in ("python", "compile", "allocator", "other_ranks", "launch")},
}
_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64(), "end_ns": pl.Int64(), "kind": pl.String(), "step": pl.Int64(), "phase": pl.String(),
        "op": pl.String(), "shapes": pl.String(), "num_ops": pl.Int64(), "most_op": pl.String(),
    }
)  # fmt: skip


def stalls(linked: Linked, replay: Replay) -> pl.DataFrame:
    """Return stretches of a millisecond or more in which the host neither launched work nor waited for the GPU.

    `kind` is one of `KINDS`. `op` is the innermost op open in the middle, on the thread that continued, with its
    `shapes`; `num_ops` counts outermost ops within it on that thread, `most_op` is the longest.
    """
    host = linked.host
    found = replay.host_stretches().filter(pl.col("end_ns") - pl.col("start_ns") >= STALL_NS)
    if found.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    threads = host.select(pl.col("event").alias("call"), "thread")
    found = found.with_row_index("gap").join(threads, on="call", how="left", maintain_order="left")
    found = found.with_columns(pl.col("thread").fill_null(pl.lit(linked.steps.main_thread, host.schema["thread"])))
    known = found.filter(pl.col("thread").is_not_null())
    pieces = by_host(linked, known)
    kinds = (
        pieces.group_by("gap", "cause")
        .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns"))
        .sort("ns", descending=True)
        .unique("gap", keep="first", maintain_order=True)
        .select("gap", pl.col("cause").cast(pl.String).alias("kind"))
    )
    middle = ((pl.col("start_ns") + pl.col("end_ns")) // 2).alias("middle")
    placed = at_times(found.join(kinds, on="gap", how="left").with_columns(middle), linked.steps, "middle")
    rows = []
    for row in placed.sort("start_ns").iter_rows(named=True):
        opened = host.filter(
            host["kind"] == "op", host["thread"] == row["thread"], host["start_ns"] <= row["middle"],
            host["end_ns"] > row["middle"],
        )  # fmt: skip
        op, shapes = opened.select("name", "shapes").row(-1) if opened.height else (None, None)
        num_ops, most_op = _inside(linked, row)
        kind = row["kind"] or "python"
        is_free = kind == "python" or (kind == "launch" and num_ops >= MANY_OPS)
        if is_free and (_is_before_forward(linked, row) or (num_ops >= MANY_OPS and _begins_forward(linked, row))):
            kind = "data"
        rows.append((row["start_ns"], row["end_ns"], kind, row["step"], row["phase"], op, shapes, num_ops, most_op))
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _is_before_forward(linked: Linked, stall: dict[str, int | str | None]) -> bool:
    """Return whether no pass of the stall's step has begun and its forward comes next."""
    phases, middle, step = linked.steps.phases, stall["middle"], stall["step"]
    if stall["phase"] not in ("other", None):
        return False
    borders = linked.steps.table.filter(pl.col("step").eq_missing(pl.lit(step)))
    if borders.is_empty():
        return False
    begin, end = borders.select("start_ns", "end_ns").row(0)
    passes = phases.filter(
        pl.col("phase").is_in(["forward", "backward"]), pl.col("end_ns") > begin, pl.col("start_ns") < end
    )
    return passes.height > 0 and passes["phase"][0] == "forward" and passes["start_ns"][0] > middle


def _begins_forward(linked: Linked, stall: dict[str, int | str | None]) -> bool:
    """Return whether the stall is in an unlabeled forward before its first launch."""
    if stall["phase"] != "forward" or not linked.steps.is_forward_found:
        return False
    phases, middle = linked.steps.phases, stall["middle"]
    around = phases.filter(pl.col("start_ns") <= middle, pl.col("end_ns") > middle)
    given = linked.device["launch_start_ns"]
    return not ((given >= int(around["start_ns"][0])) & (given < middle)).any()


def _inside(linked: Linked, stall: dict[str, int | str | None]) -> tuple[int, str | None]:
    """Return the number of outermost ops in a stall on its thread, and the name with most time."""
    host = linked.host
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
