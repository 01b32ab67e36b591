"""Finds the largest batch that fits by doubling, then bisecting; each try runs in its own process."""

from collections.abc import Callable
from typing import Any

from stepscope.errors import UsageError
from stepscope.rows import Row
from stepscope.sweep.grid import Point, changed, renamed
from stepscope.sweep.protocol import OK, OOM
from stepscope.sweep.runner import Runner
from stepscope.workloads.workload import Workload

HIGHEST = 1 << 24


def largest(fits: Callable[[int], bool], start: int, stride: int | None = None) -> int:
    """Return the largest number that fits, 0 if not even 1 does; numbers above `HIGHEST` are not tried.

    Moves from `start` in doubling strides, up or down, until one number fits and one does not, then bisects. The
    first stride is `start` itself unless given.

    >>> largest(lambda batch: batch <= 37, start=4)
    37
    """
    low, high = 0, None
    number = max(1, start)
    stride = stride or number
    while high is None or high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        if low >= HIGHEST:
            break
        if high is None:
            number = low + stride
        elif low == 0:
            number = max(high - stride, high // 2)
        else:
            number = (low + high) // 2
        stride *= 2
    return low


# Two passes after the first, because the optimizer creates its state at the end of the first.
SHORT = {"warmup": 1, "steps": 2}

# If a batch fits a short run but not a full one, retry with 1/50 less.
RETRY_SHARE = 50


def max_batch_point(point: Point, budget_bytes: int | None) -> Point:
    """Return the point, with its own hash, whose row will give the largest batch."""
    if "batch" not in point.config:
        raise UsageError(f"--max-batch needs a knob 'batch', which {point.workload} does not have")
    return renamed(point, {"max_batch_budget_bytes": budget_bytes})


class _Inconclusive(Exception):
    """A try that failed for another reason than memory."""


class MaxBatch:
    """`run(point)` returns the row of the largest batch that fits, with all tries."""

    def __init__(self, workload: Workload[Any], runner: Runner, on_try: Callable[[int, str], None]) -> None:
        self._workload, self._runner, self._on_try = workload, runner, on_try

    def run(self, point: Point) -> Row:
        """Search from the point's batch, then measure the largest batch that fits in full.

        `ok` fits and `oom` does not. Any other status says nothing about memory and ends the search with that row.
        """
        tries: list[Row] = []
        row: Row = {}

        def fits(batch: int) -> bool:
            nonlocal row
            row = self._runner.run(changed(self._workload, point, batch=batch, **SHORT), probe=True)
            tries.append(_summary(row))
            self._on_try(batch, row["status"])
            if row["status"] not in (OK, OOM):
                raise _Inconclusive(batch)
            return bool(row["status"] == OK)

        try:
            batch = largest(fits, int(point.config["batch"]))
        except _Inconclusive as end:
            row["reason"] = f"batch {end}: {row.get('reason')}"
            return self._result(point, row, tries, None)
        while batch:
            row = self._runner.run(changed(self._workload, point, batch=batch))
            if row["status"] != OOM:
                return self._result(point, row, tries, batch)
            tries.append(_summary(row))  # more steps fragment memory further
            batch -= max(1, batch // RETRY_SHARE)
        return self._result(point, row, tries, None)

    def _result(self, point: Point, row: Row, tries: list[Row], batch: int | None) -> Row:
        budget = self._runner.options.memory_limit_bytes
        return {**row, "hash": point.hash, "max_batch": batch, "max_batch_budget_bytes": budget, "tries": tries}


def _summary(row: Row) -> Row:
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes", "oom")
    return {"batch": row["config"]["batch"], "status": row["status"], **{n: row[n] for n in names if n in row}}
