"""Coordinate descent: changes one knob at a time around the best point, until a whole round gains nothing.

Machines drift, so the best point is measured again before each knob, and compared rows are close in time. A value is
kept if its median is more than 1 % faster per token and a rank test agrees, both at first and after measuring both
points again. At the end the defaults, the best, the next best and the frontier are measured again in turns. Only
those rows count.
"""

from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Any

from stepscope.rows import Row
from stepscope.sweep.grid import Point
from stepscope.sweep.protocol import OK, OOM, UNPROVEN
from stepscope.sweep.tuning.space import BATCH, CHECKPOINT, COMPILE, ORDER, SDPA, SET_BY_STEP, Axis, Space, value_of
from stepscope.sweep.tuning.trials import BESIDE, DEFAULTS, OutOfTime, Trials, cost_ns, costs_ns, is_pruned, steady_ns
from stepscope.workloads.workload import Value

LEAST_GAIN = 0.01
HOPELESS = 2.0  # a value this many times slower than the best is not tried again in later rounds
LARGEST_BATCH = 1 << 24
TIME, SETTLED, STUCK, INTERRUPTED = "time", "settled", "stuck", "interrupted"


def next_power(value: int) -> int:
    """Return the next power of two above a number.

    >>> next_power(4), next_power(6)
    (8, 8)
    """
    return 1 << value.bit_length()


def power_below(value: int) -> int:
    """Return the next power of two below a number; 0 if there is none.

    >>> power_below(8), power_below(6), power_below(1)
    (4, 4, 0)
    """
    return 1 << (value - 1).bit_length() - 1 if value > 1 else 0


class Search:
    """`run()` finds the best point; `to_json()` returns the log of the search."""

    def __init__(
        self, space: Space, trials: Trials, is_faster: Callable[[list[float], list[float], float], bool]
    ) -> None:
        """`is_faster(before, after, share)` returns whether costs are significantly lower by at least that share."""
        self._space, self._trials, self._is_faster = space, trials, is_faster
        self.best: Point | None = None
        self.moves: list[dict[str, Any]] = []  # changes of knobs that were kept; gain: speed ÷ speed before
        self.not_tried: list[dict[str, Any]] = []
        self.num_rounds = 0
        self.stopped = TIME
        self._axes = space.axes
        self._hopeless: set[tuple[str, Value]] = set()
        self._waiting: list[dict[str, Value]] = []
        self._is_full = False
        self._without_sdpa: set[tuple[Value, ...]] = set()
        self._beside: Row = {}
        self._best_ns = 0.0
        self._contenders: list[Point] = []

    @property
    def points(self) -> dict[str, Point]:
        """Every point with a row, by hash."""
        return self._trials.points

    def to_json(self) -> dict[str, Any]:
        return {
            "defaults": self._space.base.hash,
            "axes": {axis.name: None if axis.values is None else list(axis.values) for axis in self._space.axes},
            "moves": self.moves,
            "not_tried": self.not_tried,
            "num_rounds": self.num_rounds,
            "stopped": self.stopped,
            "contenders": [point.hash for point in self._contenders],
        }

    def run(self) -> None:
        """Search until nothing gains or time runs out, then measure the contenders again."""
        try:
            self._begin()
            while self._round():
                pass
            self.stopped = STUCK if self.best is None else SETTLED
        except OutOfTime:
            self._list_waiting("no time was left")
        self._trials.reserved_s = 0.0
        if self.best is not None:
            self._contenders = self._trials.affordable(self.best)
            with suppress(OutOfTime):
                self._trials.measure_in_turns(self._contenders)

    def interrupt(self) -> None:
        self._list_waiting("the search was interrupted")
        self.stopped = INTERRUPTED

    def _begin(self) -> None:
        base = self._space.base
        self._waiting = [{axis.name: value} for axis in self._axes for value in self._others(axis)]
        row = self._trials.pace = self._trials.row(base, DEFAULTS)
        if row["status"] == OK:
            self.best, self._beside, self._best_ns = base, row, cost_ns(row)
            self._trials.reserve([base, base])
        left_out: tuple[str, ...] = ()
        if "num_tokens" in row and "num_parameters" not in row:
            left_out, reason = SET_BY_STEP, "a complete training step sets this itself"
        elif row["status"] == OK and not row.get("num_tokens"):
            left_out, reason = (BATCH,), "the workload does not say how many tokens a batch has"
        for axis in self._axes:
            if axis.name in left_out:
                self._leave_out([{axis.name: value} for value in self._others(axis)], reason)
        self._axes = tuple(axis for axis in self._axes if axis.name not in left_out)
        if self._is_short_of_memory(row) and any(axis.name == BATCH for axis in self._axes):
            self._shrink()

    def _round(self) -> bool:
        """Try every knob once; return whether one of them gained."""
        self.num_rounds += 1
        num_before = len(self.moves)
        for place, axis in enumerate(self._axes):
            self._waiting = [{later.name: value} for later in self._axes[place:] for value in self._others(later)]
            if any(self._turned({axis.name: v}).hash not in self._trials.rows for v in self._others(axis)):
                self._measure_best_beside(axis)
            if axis.values is None:
                self._climb()
            else:
                self._compare(axis)
        self._waiting = []
        return len(self.moves) > num_before

    def _others(self, axis: Axis) -> list[Value]:
        current = value_of(self._center, axis.name)
        if axis.values is None:
            return [next_power(int(current))]
        return [v for v in axis.values if v != current and (axis.name, v) not in self._hopeless]

    @property
    def _center(self) -> Point:
        return self._space.base if self.best is None else self.best

    def _turned(self, turned: dict[str, Value]) -> Point:
        return self._space.changed(self._center, **turned)

    def _measure_best_beside(self, axis: Axis) -> None:
        """Measure the best point again, unless it was measured last, and correct for drift."""
        if self.best is None or self._trials.last == self.best.hash:
            return
        row = self._trials.again(self.best, BESIDE, self.num_rounds, axis.name)
        if row["status"] == OK:
            self._trials.scale = self._best_ns / cost_ns(row)
            self._beside = row

    def _compare(self, axis: Axis) -> None:
        """Try every other value of a knob around the best point and keep the fastest if it gains."""
        found: list[tuple[Point, dict[str, Value]]] = []
        ways = tuple(value_of(self._center, own.name) for own in self._axes if own.name not in ORDER)
        for value in self._others(axis):
            turned = {axis.name: value}
            if axis.name == SDPA and ways in self._without_sdpa:
                reason = "this variant does not call scaled_dot_product_attention"
                self._leave_out([turned], reason)
                continue
            point, row = self._try(turned)
            found.append((point, turned))
            # A missing backend raises an error when called, so an unproven one was never called.
            if axis.name == SDPA and row["status"] == UNPROVEN:
                self._without_sdpa.add(ways)
            if axis.name == CHECKPOINT and self._is_full and BATCH in point.config:
                larger = {**turned, BATCH: next_power(int(value_of(self._center, BATCH)))}
                found.append((self._try(larger)[0], larger))
        self._keep_fastest(found)

    def _climb(self) -> None:
        """Try larger powers of two while they gain; if the first does not, smaller ones."""
        self._is_full = False
        has_gained = False
        while (value := next_power(int(value_of(self._center, BATCH)))) <= LARGEST_BATCH:
            point, row = self._try({BATCH: value})
            self._is_full = self._is_short_of_memory(row)
            if not self._keep_fastest([(point, {BATCH: value})]):
                break
            has_gained = True
        while not has_gained and (value := power_below(int(value_of(self._center, BATCH)))):
            if not self._keep_fastest([(self._try({BATCH: value})[0], {BATCH: value})]):
                break

    def _shrink(self) -> None:
        """Try smaller batches until one fits, if the defaults do not."""
        value = int(value_of(self._space.base, BATCH))
        while self.best is None and (value := power_below(value)):
            point, row = self._try({BATCH: value})
            self._keep_fastest([(point, {BATCH: value})])
            if not self._is_short_of_memory(row):
                break

    def _try(self, turned: dict[str, Value]) -> tuple[Point, Row]:
        point = self._turned(turned)
        self._waiting = [turned, *(other for other in self._waiting if other != turned)]
        row = self._trials.row(point, round_number=self.num_rounds)
        self._waiting.pop(0)
        if len(turned) == 1:
            ((name, value),) = turned.items()
            is_slow = row["status"] == OK and self.best is not None and steady_ns(row) > HOPELESS * self._best_ns
            has_failed = row["status"] != OK and not self._is_short_of_memory(row)
            if has_failed or (is_slow and name != BATCH):
                self._hopeless.add((name, value))
        return point, row

    def _keep_fastest(self, found: list[tuple[Point, dict[str, Value]]]) -> bool:
        """Make the fastest of some points the best if it gains; return whether it did."""
        rows = self._trials.rows
        usable = [entry for entry in found if rows[entry[0].hash]["status"] == OK]
        if not usable:
            return False
        point, turned = min(usable, key=lambda entry: steady_ns(rows[entry[0].hash]))
        row, gain = rows[point.hash], None
        if self.best is not None and (gain := self._gain(point, row)) is None:
            return False
        self._best_ns = steady_ns(row) if gain is None else self._best_ns / gain
        old = {name: value_of(self._center, name) for name in turned}
        self.moves.append({"round": self.num_rounds, "turned": turned, "before": old, "gain": gain})
        self.best, self._beside = point, row
        if row["run"][COMPILE] == "off":
            self._trials.pace = row
        self._trials.reserve(self._trials.candidates(point))
        return True

    def _gain(self, point: Point, row: Row) -> float | None:
        """Return the speedup of a point over the best; None unless it is significant twice."""
        assert self.best is not None
        # Corrected to the time when the best was measured last.
        scale = row["tune"]["scale"] * cost_ns(self._beside) / self._best_ns
        before, after = costs_ns(self._beside), [cost * scale for cost in costs_ns(row)]
        if not self._is_faster(before, after, LEAST_GAIN):
            return None
        for tried, costs in ((self.best, before), (point, after)):
            again = self._trials.again(tried, BESIDE, self.num_rounds, f"{self.best.hash} {point.hash}")
            if again["status"] == OK:
                costs += costs_ns(again)
        return median(before) / median(after) if self._is_faster(before, after, LEAST_GAIN) else None

    @staticmethod
    def _is_short_of_memory(row: Row) -> bool:
        return row["status"] == OOM or is_pruned(row)

    def _list_waiting(self, reason: str) -> None:
        self._leave_out(self._waiting, reason)
        self._waiting = []

    def _leave_out(self, changes: list[dict[str, Value]], reason: str) -> None:
        self.not_tried += [{"round": self.num_rounds, "turned": turned, "reason": reason} for turned in changes]
