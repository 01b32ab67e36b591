"""Measures one point of a tuning: skipped by its memory plan, or run and compared with the plainest variant."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from stepscope.formatting import duration, percent, size
from stepscope.recorder.run_facts import now
from stepscope.rows import Row
from stepscope.sweep.checks.gate import TOLERANCE
from stepscope.sweep.grid import Point, renamed
from stepscope.sweep.protocol import OK, OOM, SKIPPED, TIMEOUT, WRONG
from stepscope.sweep.results import Results
from stepscope.sweep.runner import Runner, identity
from stepscope.sweep.tuning.space import BATCH, COMPILE, Space

# A GradScaler skips steps until it has found its scale, so the weights have moved less often.
SCALED = "autocast_fp16"


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """A point's losses compared with the plainest variant's; JSON with `dataclasses.asdict`."""

    passed: bool | None  # None if it could not be checked
    reason: str | None  # why it failed or could not be checked
    plain_loss: float | None = None  # the plainest variant's loss in the first call
    deviation: float | None = None
    """The larger deviation of first and last loss, as a share of the plainest variant's larger loss."""
    tolerance: float | None = None  # the allowed deviation for the dtype
    is_final: bool = False  # whether deviation and tolerance are for the last loss instead of the first


def no_loss(row: Mapping[str, Any]) -> LossCheck:
    gate = "; its outputs passed the gate" if (row.get("gate") or {}).get("passed") else ""
    return LossCheck(passed=None, reason=f"the workload has no loss{gate}")


def check_loss(row: Mapping[str, Any], plain: Mapping[str, Any]) -> LossCheck:
    """Compare a point's row with the plainest variant's: same sizes, batch, seed and number of steps."""
    if "samples_device_ns" not in plain:
        reason = f"the plainest variant did not run: {plain['status']}: {plain.get('reason') or plain['status']}"
        return LossCheck(passed=None, reason=reason)
    dropped = [(side.get("facts") or {}).get("dropped_share", 0) for side in (row, plain)]
    if dropped[0] > 0 and not dropped[1] > 0:
        reason = f"it drops {percent(dropped[0])} of the routed tokens, the plainest variant none"
        return LossCheck(passed=False, reason=reason)
    if plain.get("loss") is None:
        return no_loss(row)
    if row.get("loss") is None:
        return LossCheck(passed=False, reason="its loss is not a number", plain_loss=plain["loss"])
    tolerances = TOLERANCE[str(row["run"]["dtype"])]
    scale = max(abs(plain["loss"]), abs(plain.get("final_loss") or 0.0)) or 1.0
    first = abs(row["loss"] - plain["loss"]) / scale
    checks = [(first / tolerances[0], first, tolerances[0], False)]
    if plain.get("final_loss") is not None and row["run"]["dtype"] != SCALED:
        if row.get("final_loss") is None:
            return LossCheck(passed=False, reason="its last loss is not a number", plain_loss=plain["loss"])
        # By then gradients have moved the weights, so the tolerance of gradients applies.
        last = abs(row["final_loss"] - plain["final_loss"]) / scale
        checks.append((last / tolerances[1], last, tolerances[1], True))
    worst, deviation, tolerance, is_final = max(checks)
    names = ("final_loss", "last loss") if is_final else ("loss", "loss")
    reason = (
        f"{names[1]} {row[names[0]]:.6g} instead of {plain[names[0]]:.6g} in the plainest variant: "
        f"relative deviation {deviation:.2g}, allowed {tolerance:.2g}"
    )
    return LossCheck(
        passed=worst <= 1,
        reason=None if worst <= 1 else reason,
        plain_loss=plain["loss"],
        deviation=deviation,
        tolerance=tolerance,
        is_final=is_final,
    )


DEFAULTS, SEARCH, REFERENCE, BESIDE, AGAIN = "defaults", "search", "reference", "beside", "again"
"""Why a row was measured: the start of the search; one of its points; a reference loss; the best so far, measured
again next to what it is compared with; a contender, measured again at the end."""
MIN_LIMIT_S = 20.0
SLOW_FACTOR = 5.0
"""An uncompiled point is killed after this many times the duration of the best point, scaled by batch size, but not
before MIN_LIMIT_S."""
NUM_AGAIN = 3
MOST_RESERVED_SHARE = 1 / 3
MOST_CONTENDERS = 8
FEWEST_CONTENDERS = 3  # always measured, even without time left: the defaults, the best, the next best


@dataclass(frozen=True)
class Forecast:
    peak_bytes: int
    fits: bool  # False only if it certainly does not fit
    reason: str | None  # why it does not fit


class OutOfTime(Exception):
    """Not enough time is left for another point."""


class Clock:
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
    """`row(point)` returns a point's row from the folder, from its plan, or measured now, and writes it."""

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
        """`forecast` gets a point and the row of the defaults; `on_begin` is called before a point runs."""
        self._space, self._runner, self._results, self.clock = space, runner, results, clock
        self._forecast, self._budget_bytes, self._timeout_s = forecast, budget_bytes, timeout_s
        self._on_begin, self._on_row = on_begin, on_row
        known = [row for row in results.rows if row["hash"] in results.hashes]
        self.rows: dict[str, Row] = {row["hash"]: row for row in known}
        self._seconds = {row["tune"]["of"]: row["seconds"] for row in known if row["status"] == OK}
        self.points: dict[str, Point] = {}  # all points with a row, including those measured only as a reference loss
        self.reserved_s = 0.0
        self.pace: Row | None = None
        """The best uncompiled row so far, or the defaults': an estimate of how long a point takes."""
        self.scale = 1.0  # factor that converts current costs to those at the start of the search: machines drift
        self.last: str | None = None  # hash of the last measured point

    def row(self, point: Point, role: str = SEARCH, round_number: int = 0) -> Row:
        """Return the point's row; OutOfTime if there is no time to measure it."""
        self.points[point.hash] = point
        if point.hash in self.rows:
            self.last = point.hash
            plain = self._space.plainest(point)
            self.points.update({plain.hash: plain} if plain.hash in self.rows else {})
            return self.rows[point.hash]
        tune: dict[str, Any] = {"role": role, "round": round_number, "of": point.hash, "scale": self.scale}
        # A reference runs only for its loss, so the memory budget does not apply.
        forecast = self._forecast(point, self.rows.get(self._space.base.hash)) if role == SEARCH else None
        if forecast is not None and not forecast.fits:
            times = {"started_at": now(), "finished_at": now(), "seconds": 0.0}
            row = {**identity(point), "status": SKIPPED, "reason": forecast.reason, "notes": [], **times}
        else:
            row = self._run(point, has_budget=role != REFERENCE)
            self._judge(point, row, tune)
        tune["predicted_bytes"] = None if forecast is None else forecast.peak_bytes
        self.last = point.hash  # not the reference of its loss
        return self._keep(row, tune)

    def again(self, point: Point, role: str, number: int, among: str) -> Row:
        """Return another row of a measured point, in the given round or turn, next to the points in `among`."""
        self.last = point.hash
        named = renamed(point, {role: [number, among]})
        tune = {"role": role, "round": number, "of": point.hash, "among": among}
        return self.rows.get(named.hash) or self._keep(self._run(named), tune)

    def candidates(self, best: Point) -> list[Point]:
        """Return the defaults, the best, the fastest other point, and the frontier of speed and memory."""
        rows = {name: self.rows[name] for name in self.points if name in self.rows}
        rows = {name: row for name, row in rows.items() if row["status"] == OK}
        ordered = sorted(rows, key=lambda name: steady_ns(rows[name]))
        chosen = [point.hash for point in (self._space.base, best) if point.hash in rows]
        chosen += [name for name in ordered if name not in chosen][:1]
        smallest = float("inf")
        for name in ordered:
            peak = memory_bytes(rows[name])
            if peak is not None and peak < smallest:
                smallest = peak
                chosen.append(name)
        return [self.points[name] for name in dict.fromkeys(chosen)][:MOST_CONTENDERS]

    def affordable(self, best: Point) -> list[Point]:
        """Return the candidates that fit in the remaining time, and the first few in any case."""
        chosen = self.candidates(best)
        while len(chosen) > FEWEST_CONTENDERS and self._turns_s(chosen) > self.clock.left_s:
            chosen.pop()
        return chosen

    def measure_in_turns(self, points: list[Point]) -> None:
        """Measure these points again, one after the other, several times; OutOfTime if there is no time for it."""
        among = " ".join(point.hash for point in points)
        for turn in range(1, NUM_AGAIN + 1):
            for point in points:
                self.again(point, AGAIN, turn, among)

    def _turns_s(self, points: list[Point]) -> float:
        return NUM_AGAIN * float(sum(self._seconds.get(point.hash, 0.0) for point in points))

    def reserve(self, contenders: list[Point]) -> None:
        """Reserve time to measure these points again, at most a third of the budget."""
        self.reserved_s = min(self._turns_s(contenders), MOST_RESERVED_SHARE * self.clock.whole_s)

    def _keep(self, row: Row, tune: dict[str, Any]) -> Row:
        row["tune"] = tune
        self._results.append(row)
        self.rows[row["hash"]] = row
        if row["status"] == OK:
            self._seconds[tune["of"]] = row["seconds"]
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
        self._need_like_device(row)
        if row["status"] == TIMEOUT:
            if left_s < limit_s:
                raise OutOfTime  # not a verdict on the point: it may be tried with more time
            if self.pace is not None:
                best = duration(self.pace["seconds"] * 1e9, 3)
                row["reason"] += f"; the best so far took {best} (raise the limit with --timeout)"
        return row

    def _need_like_device(self, row: Row) -> None:
        """Mark a row from another kind of device than the first row's as skipped: the search compares times."""
        known = self._results.facts["environments"]
        names = [known.get(each.get("environment_hash", ""), {}).get("device_name") for each in self.rows.values()]
        first, name = next(filter(None, names), None), (row.get("environment") or {}).get("device_name")
        if first is not None and name is not None and name != first:
            row.update(status=SKIPPED, reason=f"it ran on {name}, the points before on {first}: not comparable")

    def _limit_s(self, point: Point) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        if self.pace is None or point.run[COMPILE] != "off":
            return float("inf")
        share = 1.0
        if BATCH in point.config:
            share = max(1.0, int(point.config[BATCH]) / int(self.pace["config"][BATCH]))
        return max(MIN_LIMIT_S, SLOW_FACTOR * float(self.pace["seconds"]) * share)

    def _judge(self, point: Point, row: Row, tune: dict[str, Any]) -> None:
        """Mark a row that exceeds the memory budget as oom, and one whose loss deviates as wrong."""
        if row["status"] != OK:
            return
        used = memory_bytes(row)
        if self._budget_bytes is not None and used is not None and used > self._budget_bytes:
            lost = {"asked_bytes": used, "free_bytes": None, "total_bytes": self._budget_bytes}
            row.update(status=OOM, oom=lost, reason=f"needs {size(used)}, the budget is {size(self._budget_bytes)}")
            return
        plain = self._space.plainest(point)
        if plain.hash != point.hash:
            check = check_loss(row, self.row(plain, REFERENCE))
        elif row.get("loss") is None:
            check = no_loss(row)
        else:
            check = LossCheck(passed=True, reason=None, plain_loss=row["loss"], deviation=0.0)
        tune["loss"] = asdict(check)
        if check.passed is False:
            row.update(status=WRONG, reason=check.reason)


def is_pruned(row: Mapping[str, Any]) -> bool:
    return row["status"] == SKIPPED and row["tune"].get("predicted_bytes") is not None


def memory_bytes(row: Mapping[str, Any]) -> int | None:
    """Return the memory a point needed: reserved on a GPU; on a CPU of tensors, else of the process."""
    names = ("peak_reserved_bytes", "peak_allocated_bytes", "peak_resident_bytes")
    return next((row[name] for name in names if row.get(name) is not None), None)


def costs_ns(row: Mapping[str, Any]) -> list[float]:
    """Return the nanoseconds per token of each sample; per step if there are no tokens."""
    return [sample / (row.get("num_tokens") or 1) for sample in row["samples_device_ns"]]


def cost_ns(row: Mapping[str, Any]) -> float:
    return median(costs_ns(row))


def steady_ns(row: Mapping[str, Any]) -> float:
    """Return the median nanoseconds per token, corrected for drift since the search began."""
    return cost_ns(row) * float(row["tune"]["scale"])
