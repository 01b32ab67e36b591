"""The largest batch that fits: doubled until one does not, then bisected; each try in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepscope.errors import UsageError
from stepscope.sweep.grid import Point, changed, renamed
from stepscope.sweep.point_process import OK, OOM
from stepscope.sweep.runner import Runner
from stepscope.sweep.tuning.largest_passing import largest
from stepscope.workloads.workload import Workload

# Two passes after the first: the optimizer's state is made at the end of the first.
SHORT = {"warmup": 1, "steps": 2}

# What fits a short run and not a whole one does so by less than one part in so many.
NEAR_THING = 50


def max_batch_point(point: Point, budget_bytes: int | None) -> Point:
    """The point whose row will say the largest batch, under a hash of its own."""
    if "batch" not in point.config:
        raise UsageError(f"{point.workload} has no knob 'batch': --max-batch has nothing to search")
    return renamed(point, {"max_batch_budget_bytes": budget_bytes})


class _OtherEnd(Exception):
    """A try that says nothing about memory."""


class MaxBatch:
    """`run(point)` gives the row of the largest batch that fits, with every try in it."""

    def __init__(self, workload: Workload[Any], runner: Runner, on_try: Callable[[int, str], None]) -> None:
        self._workload = workload
        self._runner = runner
        self._on_try = on_try

    def run(self, point: Point) -> dict[str, Any]:
        """Search upwards from the point's batch; what fits is then measured in full.

        Only `ok` fits and only `oom` does not: any other end of a try says nothing about memory, and is the row.
        """
        tries: list[dict[str, Any]] = []
        row: dict[str, Any] = {}

        def fits(batch: int) -> bool:
            nonlocal row
            row = self._try(changed(self._workload, point, batch=batch, **SHORT), tries)
            if row["status"] not in (OK, OOM):
                raise _OtherEnd(batch)
            return bool(row["status"] == OK)

        try:
            batch = largest(fits, int(point.config["batch"]))
        except _OtherEnd as end:
            row["reason"] = f"batch {end}: {row.get('reason')}"
            return self._told(point, row, tries, None)
        while batch:
            row = self._runner.run(changed(self._workload, point, batch=batch))
            if row["status"] != OOM:
                return self._told(point, row, tries, batch)
            tries.append(_summary(row))  # more steps, more fragments: it was a near thing
            batch -= max(1, batch // NEAR_THING)
        return self._told(point, row, tries, None)

    def _try(self, point: Point, tries: list[dict[str, Any]]) -> dict[str, Any]:
        row = self._runner.run(point, probe=True)
        tries.append(_summary(row))
        self._on_try(int(point.config["batch"]), row["status"])
        return row

    def _told(
        self, point: Point, row: dict[str, Any], tries: list[dict[str, Any]], batch: int | None
    ) -> dict[str, Any]:
        budget = self._runner.options.memory_limit_bytes
        return {**row, "hash": point.hash, "max_batch": batch, "max_batch_budget_bytes": budget, "tries": tries}


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes", "oom")
    return {"batch": row["config"]["batch"], "status": row["status"], **{n: row[n] for n in names if n in row}}
