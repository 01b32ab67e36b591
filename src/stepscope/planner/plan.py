"""Plans points of a workload on devices, and searches the largest batch or the longest sequence that fits."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch

from stepscope.devices.limits import Device, find_device, known_devices, nearest_names
from stepscope.display import Shown
from stepscope.errors import UsageError
from stepscope.formatting import safe
from stepscope.planner.emulation.torch_support import this_torch
from stepscope.planner.hardware import CONTEXT_BYTES
from stepscope.planner.parallel import Parallel
from stepscope.sweep.grid import Point, changed
from stepscope.sweep.tuning.max_batch import HIGHEST, largest
from stepscope.workloads.users_code import users_code
from stepscope.workloads.workload import Workload

with this_torch():
    from stepscope.planner.prediction import FITS, GROWS, MARGIN, NOT_KNOWN, Planner, Prediction

MOST_PLANNED_RANKS = 1024  # in the search for the fewest
MANY_VALUES = 5  # if so many values need the same memory, the knob has no effect
MOST_GUESSES = 8
FINE = 128  # a guess is good if the next one differs by at most 1/FINE
_PLAN = str(Path(__file__).parent)
_USERS_CODE = str(Path(_PLAN).parent / "workloads" / "users_code.py")
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = str(Path(contextlib.__file__).parent)


class _ChangesNothing(Exception):
    """The search would never end."""


class Search:
    """Caches predictions of one point at different values of one knob. `predict` is called once per value."""

    def __init__(self, knob: str, predict: Callable[[int], Prediction]) -> None:
        self._knob, self._predict = knob, predict
        self._seen: dict[int, Prediction | None] = {}
        self._refused: dict[int, str] = {}

    def run(self, start: int) -> tuple[int | None, str | None]:
        """Return the largest value that fits (0 if 1 does not), and what limits it if it is not memory."""
        first = self._look(start)
        if first is None or first.usable_bytes is None:
            return None, self._refused.get(start, "a CPU has no fixed memory limit")
        if first.fits == GROWS:
            return None, "memory grows with every step, so no value fits for long"
        if first.fits == NOT_KNOWN:
            return None, "an optimizer never stepped, so the size of its state is unknown"
        try:
            guess = self._guess(start, int(first.usable_bytes * (1 - MARGIN)))
            value = largest(self._fits, guess or start, guess and max(1, guess // FINE))
        except _ChangesNothing:
            return None, f"{self._knob} does not change the memory of a step"
        if value >= HIGHEST:
            return value, "no larger value was tried"
        lowest = min(tried for tried in self._seen if tried > value)
        why = self._refused.get(lowest)
        return value, None if why is None else f"{self._knob}={lowest} cannot be planned: {why}"

    def _fits(self, value: int) -> bool:
        found = self._look(value)
        return found is not None and found.fits == FITS

    def _look(self, value: int) -> Prediction | None:
        if value not in self._seen:
            try:
                self._seen[value] = self._predict(value)
            except UsageError as error:
                if not _is_programs_own(error):
                    raise UsageError(f"{self._knob}={value}: {error}") from error
                self._seen[value], self._refused[value] = None, str(error)
            needs = [(found.flops, found.live_at_peak) for found in self._seen.values() if found is not None]
            if len(needs) == MANY_VALUES and all(need == needs[0] for need in needs):
                raise _ChangesNothing
        return self._seen[value]

    def _guess(self, start: int, room_bytes: int) -> int | None:
        """Return about where allocated memory fills the room, from parabolas through the last three values.

        Attention's memory grows with the square of the length. What fits is somewhat less. None if unknown.
        """
        points: list[tuple[int, int]] = []
        value = start
        for _ in range(MOST_GUESSES):
            found = self._look(value)
            if found is None:
                return None
            points = [*points[-2:], (value, found.peak_allocated_bytes)]
            reached = _crossing(points, room_bytes) if len(points) == 3 else None
            if reached is None:
                reached = 2 * value if found.fits == FITS else value // 2
            last, value = value, min(max(1, reached), HIGHEST)
            if abs(value - last) <= last // FINE:
                return value
        return None


def _is_programs_own(error: UsageError) -> bool:
    """Return whether the program or one of its ops rejects a size, and not the planner.

    By then the program's exception has been summarized in one line, and is the context of this one.
    """
    trace = (error.__context__ or error).__traceback__
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    theirs = [file for file in files if not file.startswith((_PLAN, _USERS_CODE, _TORCH))]
    is_theirs = any("site-packages" in file or not file.startswith(_LIBRARY) for file in theirs)
    return is_theirs and not files[-1].startswith(_PLAN)


def _crossing(points: list[tuple[int, int]], wanted: int) -> int | None:
    """Return where the parabola through three points reaches a height, or None if it does not rise there."""
    (x0, y0), (x1, y1), (x2, y2) = points
    if len({x0, x1, x2}) < 3:
        return None
    last, before = (y2 - y1) / (x2 - x1), (y1 - y0) / (x1 - x0)
    bend = (last - before) / (x2 - x0)
    slope = last + bend * (x2 - x1)
    inside = slope * slope + 4 * bend * (wanted - y2)
    if slope <= 0 or inside < 0:
        return None
    return x2 + int(2 * (wanted - y2) / (slope + math.sqrt(inside)))


CPU = "cpu"
MAX_BATCH, MAX_LENGTH = "max_batch", "max_seq_len"
MIN_RANKS = "min_ranks"
KNOBS = {MAX_BATCH: "batch", MAX_LENGTH: "seq_len"}  # the key of a search's answer, and the knob that it searches


@dataclass(frozen=True)
class Planned:
    point: Point
    prediction: Prediction
    largest: Mapping[str, int | None]
    """`max_batch`, `max_seq_len` and `min_ranks`, if asked for; None if nothing limits them, or nothing is known."""
    bounded_by: Mapping[str, str]  # what limits a search if it is not memory, by the search's key

    def to_json(self) -> dict[str, Any]:
        """Return one row of `predictions` (docs/plan.md)."""
        row = {**self.prediction.to_json(), "workload": self.point.workload, "preset": self.point.preset}
        row["config"] = dict(self.point.config)
        row["run"] = {name: value for name, value in self.point.run.items() if name != "device"}
        return {**row, "bounded_by": dict(self.bounded_by), **self.largest}


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """What training steps need: one prediction per point and device."""

    planned: tuple[Planned, ...]  # every point on every device, with the answers of searches

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Return the predictions alone, in the same order."""
        return tuple(each.prediction for each in self.planned)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the predictions as JSON values, with their points."""
        return [each.to_json() for each in self.planned]

    def to_json(self) -> dict[str, Any]:
        """Return the first prediction's keys, its point's verdict on every device, and all predictions."""
        rows = self.rows
        first = {name: value for name, value in rows[0].items() if name not in ("device", "fits")}
        fits: dict[str, str | None] = {}
        for row in rows:
            fits.setdefault(row["device"], row["fits"])
        return {**first, "fits": fits, "predictions": rows}


def find_devices(names: Iterable[str]) -> list[Device | None]:
    """Return the devices with these names, None for `cpu`; UsageError with similar names for an unknown one."""
    found: list[Device | None] = []
    for name in dict.fromkeys(name.strip() for name in names):
        device = None if name == CPU else find_device(name)
        if device is None and name != CPU:
            near = nearest_names(name, 8) or [known.name for known in known_devices()][:3]
            raise UsageError(f"{name!r} is not a known device. Use cpu or a full name: {', '.join(near)}")
        found.append(device)
    return found


def spread_over(parallel: Parallel | None, num_ranks: int) -> Parallel | None:
    """Return the same way to train on another number of ranks; FSDP2 if there was one rank."""
    base = parallel or Parallel()
    if num_ranks == 1:
        return Parallel(offload=True) if base.offload else None
    if base.tp is not None:
        return replace(base, tp=num_ranks)
    if base.pp is not None:
        return replace(base, pp=num_ranks, split=(), num_microbatches=max(base.num_microbatches, num_ranks))
    return replace(base, fsdp=num_ranks // base.replicas) if base.ddp is None else replace(base, ddp=num_ranks)


def fewest_ranks(fits: Callable[[int], bool], parallel: Parallel | None) -> tuple[int | None, str | None]:
    """Return the smallest number of ranks that fits, and why there is none; ranks share memory unless with DDP.

    >>> fewest_ranks(lambda number: number >= 6, None)
    (6, None)
    """
    step = parallel.replicas if parallel else 1
    is_pipeline = parallel is not None and parallel.way == "pp"  # its model has no loss, so it cannot run as one
    if step == 1 and not is_pipeline and fits(1):
        return 1, None
    if parallel is not None and parallel.ddp is not None:
        return None, "a rank of DDP has the whole model, so more ranks do not help. Use --fsdp"
    is_split = parallel is not None and parallel.way in ("tp", "pp")  # not into any number of parts
    high = 2 * step
    try:
        while not fits(high):
            if 2 * high > MOST_PLANNED_RANKS:
                return None, f"not even {high} ranks fit"
            high *= 2
    except UsageError as error:
        if not is_split:
            raise
        return None, f"{high // 2} do not fit, and {high} cannot be planned: {error}"
    low = high // 2
    while not is_split and high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high, None


def plan_points(
    workload: Workload[Any],
    points: Sequence[Point],
    devices: Sequence[Device | None],
    *,
    parallel: Parallel | None = None,
    searches: Sequence[str] = (),
    limit_bytes: int | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Return the plan of every point on every device; `on_line` receives what is being planned.

    With `limit_bytes`, that is a GPU's memory, and the fewest ranks that fit are searched too.
    """
    planner = Planner(workload, parallel, limit_bytes)
    if limit_bytes is not None and limit_bytes <= CONTEXT_BYTES:
        raise UsageError(f"fit={limit_bytes}: a GPU needs more than {CONTEXT_BYTES} bytes for its context alone")

    def fits_on(point: Point, device: Device | None, num_ranks: int) -> bool:
        on_line(safe(f"planning {point.workload} on {num_ranks} ranks"))
        with users_code(), this_torch():
            spread = spread_over(parallel, num_ranks)
            return Planner(workload, spread, limit_bytes).predict(point, device).fits == FITS

    def predict(point: Point, device: Device | None, **changes: int) -> Prediction:
        values = " ".join((point.preset or "", *(f"{name}={value}" for name, value in changes.items())))
        on_line(safe(f"planning {point.workload} {values} on {CPU if device is None else device.name}"))
        with users_code(), this_torch():
            return planner.predict(changed(workload, point, **changes) if changes else point, device)

    def planned(point: Point, device: Device | None) -> Planned:
        prediction = predict(point, device)
        largest: dict[str, int | None] = {}
        bounded_by: dict[str, str] = {}
        for key in searches:
            knob = KNOBS[key]
            if knob not in point.config:
                raise UsageError(f"{point.workload} has no knob {knob!r} to search")
            # A pipeline's batch has as many rows for each micro-batch.
            factor = parallel.num_microbatches if parallel is not None and key == MAX_BATCH else 1
            search = Search(knob, lambda value: predict(point, device, **{knob: value * factor}))  # noqa: B023  # run at once
            value, reason = search.run(max(1, int(point.config[knob]) // factor))
            largest[key] = None if value is None else value * factor
            bounded_by |= {} if reason is None else {key: reason}
        if limit_bytes is not None:
            largest[MIN_RANKS], reason = fewest_ranks(lambda number: fits_on(point, device, number), parallel)
            bounded_by |= {} if reason is None else {MIN_RANKS: reason}
        return Planned(point, prediction, largest, bounded_by)

    return Plan(tuple(planned(point, device) for point in points for device in devices))
