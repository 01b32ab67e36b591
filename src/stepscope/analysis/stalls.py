"""Where the host gave the GPU nothing for long, and what it did meanwhile."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.idle import CAUSES, PLANNING_NS, by_host
from stepscope.analysis.links import Linked
from stepscope.analysis.replay import Replay
from stepscope.analysis.steps import at_times

STALL_NS = PLANNING_NS
KINDS = {
    "data": "It waited for a batch, or prepared one: between the step's start and its forward.",
    **{name: CAUSES[name] for name in ("python", "compile", "allocator", "other_ranks", "launch")},
}
_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64(), "end_ns": pl.Int64(), "kind": pl.String(), "step": pl.Int64(), "phase": pl.String(),
        "op": pl.String(), "shapes": pl.String(),
    }
)  # fmt: skip


def stalls(linked: Linked, replay: Replay) -> pl.DataFrame:
    """Stretches of a millisecond and more in which the host neither gave the GPU work nor waited for it.

    `start_ns`, `end_ns`, `kind` (one of `KINDS`, of most of the time), `step`, `phase`; `op`, the innermost open in
    the middle of it on the thread that went on, and its `shapes`; null where none was.
    """
    host = linked.host
    found = replay.host_stretches().filter(pl.col("end_ns") - pl.col("start_ns") >= STALL_NS)
    if found.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    threads = host.select(pl.col("event").alias("call"), "thread")
    found = found.with_row_index("gap").join(threads, on="call", how="left", maintain_order="left")
    found = found.with_columns(pl.col("thread").fill_null(pl.lit(linked.steps.main_thread, host.schema["thread"])))
    known = found.filter(pl.col("thread").is_not_null())
    pieces = pl.concat([by_host(linked, part) for part in known.partition_by("thread")])
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
        kind = row["kind"] or "python"
        if kind == "python" and row["phase"] in ("other", None) and _is_before_forward(linked, row):
            kind = "data"
        rows.append((row["start_ns"], row["end_ns"], kind, row["step"], row["phase"], op, shapes))
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _is_before_forward(linked: Linked, stall: dict[str, int | str | None]) -> bool:
    """Whether no pass of the stall's step has begun, and its forward comes next."""
    phases, middle, step = linked.steps.phases, stall["middle"], stall["step"]
    borders = linked.steps.table.filter(pl.col("step").eq_missing(pl.lit(step)))
    if borders.is_empty():
        return False
    begin, end = borders.select("start_ns", "end_ns").row(0)
    passes = phases.filter(
        pl.col("phase").is_in(["forward", "backward"]), pl.col("end_ns") > begin, pl.col("start_ns") < end
    )
    return passes.height > 0 and passes["phase"][0] == "forward" and passes["start_ns"][0] > middle
