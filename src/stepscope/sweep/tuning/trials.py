"""One point of a tuning: pruned by its plan, or measured in a process of its own and held against the plainest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from stepscope.recorder.origin import now
from stepscope.sweep.grid import Point, renamed
from stepscope.sweep.point_process import OK, OOM, SKIPPED, WRONG
from stepscope.sweep.results import Results
from stepscope.sweep.rows import TIMEOUT, identity
from stepscope.sweep.runner import Runner
from stepscope.sweep.tuning.losses import LossCheck, check_loss, no_loss
from stepscope.sweep.tuning.space import BATCH, COMPILE, Space

Row = dict[str, Any]
DEFAULTS, SEARCH, REFERENCE, BESIDE, AGAIN = "defaults", "search", "reference", "beside", "again"
"""Why a row is there: where the search begins; one of its points; a loss to hold others against; the best so far,
measured beside what it is compared with; a contender, measured again at the end."""
MIN_LIMIT_S = 20.0
TIMES_AS_LONG = 5.0
"""A point that is not compiled and takes so many times as long as the best, by its share of the batch, and more than
the least limit, is killed: it is not going to be faster."""
NUM_AGAIN = 3
MOST_RESERVED_SHARE = 1 / 3


@dataclass(frozen=True)
class Forecast:
    """What a plan says of a point."""

    peak_bytes: int
    fits: bool
    """False only where it cannot fit."""
    reason: str | None
    """Why it does not."""


class OutOfTime(Exception):
    """What is left of the time is not enough for another point."""


class Clock:
    """How much of the time that the user gave is left."""

    def __init__(self, whole_s: float) -> None:
        self.whole_s = whole_s
        self._start = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        return self.whole_s - self.spent_s


class Trials:
    """`row(point)` is a point's row: from the folder, from its plan, or measured now; written before it returns."""

    def __init__(
        self,
        space: Space,
        runner: Runner,
        results: Results,
        clock: Clock,
        *,
        forecast: Callable[[Point, Row | None], Forecast | None],
        budget_bytes: int | None,
        timeout_s: float | None,
        on_begin: Callable[[], None],
        on_row: Callable[[Row], None],
    ) -> None:
        """`forecast` is told a point and the row of the defaults; `on_begin` is called when a point is run."""
        self._space, self._runner, self._results, self.clock = space, runner, results, clock
        self._forecast, self._budget_bytes, self._timeout_s = forecast, budget_bytes, timeout_s
        self._on_begin, self._on_row = on_begin, on_row
        self._rows = {row["hash"]: row for row in results.rows}
        self._seconds = {row["tune"]["of"]: row["seconds"] for row in results.rows if row["status"] == OK}
        self.points: dict[str, Point] = {}
        """All that have a row, those among them that others' losses were held against."""
        self.reserved_s = 0.0
        self.pace: Row | None = None
        """The best row so far that is not compiled, or that of the defaults: how long a point takes."""
        self.scale = 1.0
        """What the costs of the moment are multiplied by to be those of when the search began: machines drift."""
        self.last: str | None = None
        """The point that was measured last."""

    def seen(self, point: Point) -> Row | None:
        """The row of a point that has one."""
        return self._rows.get(point.hash)

    def row(self, point: Point, role: str = SEARCH, round_number: int = 0) -> Row:
        """The point's row; OutOfTime where there is no time for it."""
        self.points[point.hash] = point
        found = self.seen(point)
        if found is not None:
            self.last = point.hash
            plain = self._space.plainest(point)
            self.points.update({plain.hash: plain} if self.seen(plain) else {})
            return found
        told: dict[str, Any] = {"role": role, "round": round_number, "of": point.hash, "scale": self.scale}
        # A reference is run for its loss: the budget is not for it.
        is_planned = role == SEARCH
        forecast = self._forecast(point, self.seen(self._space.base)) if is_planned else None
        if forecast is not None and not forecast.fits:
            row = _skipped(point, forecast)
        else:
            row = self._run(point, has_budget=role != REFERENCE)
            self._judge(point, row, told)
        told["predicted_bytes"] = None if forecast is None else forecast.peak_bytes
        self.last = point.hash  # not the one that its loss was held against
        return self._keep(row, told)

    def again(self, point: Point, role: str, number: int, among: str) -> Row:
        """Another row of a point that was measured before: in that round, or turn, `among` these."""
        self.last = point.hash
        named = renamed(point, {role: [number, among]})
        found = self.seen(named)
        return found or self._keep(
            self._run(named), {"role": role, "round": number, "of": point.hash, "among": among}
        )

    def turns_s(self, points: list[Point]) -> float:
        """How long it will take to measure these again in turns: what was compiled once is quicker the next time."""
        return NUM_AGAIN * float(sum(self._seconds.get(point.hash, 0.0) for point in points))

    def reserve(self, contenders: list[Point]) -> None:
        """Leave time to measure these again, or as much of it as can be spared."""
        wanted = self.turns_s(contenders)
        self.reserved_s = min(wanted, MOST_RESERVED_SHARE * self.clock.whole_s)

    def _keep(self, row: Row, told: dict[str, Any]) -> Row:
        row["tune"] = told
        self._results.append(row)
        self._rows[row["hash"]] = row
        if row["status"] == OK:
            self._seconds[told["of"]] = row["seconds"]
        self._on_row(row)
        return row

    def _run(self, point: Point, has_budget: bool = True) -> Row:
        left_s = self.clock.left_s - self.reserved_s
        if left_s < min(self._seconds.values(), default=0.0):
            raise OutOfTime
        limit_s = self._limit_s(point)
        self._on_begin()
        options = self._runner.options
        limit_bytes = options.memory_limit_bytes if has_budget else None
        self._runner.options = replace(options, timeout_s=min(limit_s, left_s), memory_limit_bytes=limit_bytes)
        try:
            row = self._runner.run(point)
        finally:
            self._runner.options = options
        if row["status"] == TIMEOUT:
            if left_s < limit_s:
                raise OutOfTime  # nothing is said about the point: it may be tried with more time
            if self.pace is not None:
                row["reason"] += f"; the best until then took {self.pace['seconds']:.1f} s (--timeout gives it more)"
        return row

    def _limit_s(self, point: Point) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        if self.pace is None or point.run[COMPILE] != "off":
            return float("inf")
        share = 1.0
        if BATCH in point.config:
            share = max(1.0, int(point.config[BATCH]) / int(self.pace["config"][BATCH]))
        return max(MIN_LIMIT_S, TIMES_AS_LONG * float(self.pace["seconds"]) * share)

    def _judge(self, point: Point, row: Row, told: dict[str, Any]) -> None:
        """Turn a row that is over the budget, or whose loss strays, into one that is not ranked."""
        if row["status"] != OK:
            return
        used = memory_bytes(row)
        if self._budget_bytes is not None and used is not None and used > self._budget_bytes:
            lost = {"asked_bytes": used, "free_bytes": None, "total_bytes": self._budget_bytes}
            row.update(status=OOM, oom=lost, reason=f"it took {_mib(used)}, the budget is {_mib(self._budget_bytes)}")
            return
        plain = self._space.plainest(point)
        check = _itself(row) if plain.hash == point.hash else check_loss(row, self.row(plain, REFERENCE))
        told["loss"] = asdict(check)
        if check.passed is False:
            row.update(status=WRONG, reason=check.reason)


def _itself(row: Row) -> LossCheck:
    if row.get("loss") is None:
        return no_loss(row)
    return LossCheck(passed=True, reason=None, plain_loss=row["loss"], deviation=0.0)


def _skipped(point: Point, forecast: Forecast) -> Row:
    at = now()
    return {
        **identity(point),
        "status": SKIPPED,
        "reason": forecast.reason,
        "notes": [],
        "started_at": at,
        "finished_at": at,
        "seconds": 0.0,
    }


def is_pruned(row: Mapping[str, Any]) -> bool:
    """Whether its plan kept a point from being run."""
    return row["status"] == SKIPPED and row["tune"].get("predicted_bytes") is not None


def memory_bytes(row: Mapping[str, Any]) -> int | None:
    """What the point needed: on a GPU reserved; on a CPU of tensors, or of the process if that is all we have."""
    names = ("peak_reserved_bytes", "peak_allocated_bytes", "peak_resident_bytes")
    return next((row[name] for name in names if row.get(name) is not None), None)


def costs_ns(row: Mapping[str, Any]) -> list[float]:
    """Nanoseconds a token of each sample; a step, where there are no tokens."""
    return [sample / (row.get("num_tokens") or 1) for sample in row["samples_device_ns"]]


def cost_ns(row: Mapping[str, Any]) -> float:
    """The median of these."""
    return median(costs_ns(row))


def steady_ns(row: Mapping[str, Any]) -> float:
    """What it would have been when the search began."""
    return cost_ns(row) * float(row["tune"]["scale"])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / (1 << 10):,.1f} KiB"
