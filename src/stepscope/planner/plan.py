"""Plans points of a workload on devices, and searches the largest batch or the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.devices.peaks import Device, find_device, known_devices, nearest_names
from stepscope.display import Shown
from stepscope.errors import UsageError
from stepscope.formatting import safe
from stepscope.planner.emulation.torch_support import this_torch
from stepscope.sweep.grid import Point, changed
from stepscope.workloads.users_code import users_code
from stepscope.workloads.workload import Workload

with this_torch():
    from stepscope.planner.fit_search import Search
    from stepscope.planner.prediction import Planner, Prediction

CPU = "cpu"
MAX_BATCH, MAX_LENGTH = "max_batch", "max_seq_len"
KNOBS = {MAX_BATCH: "batch", MAX_LENGTH: "seq_len"}
"""The key of a search's answer, and the knob that it searches."""
MOST_RANKS = 16384


@dataclass(frozen=True)
class Planned:
    """The prediction of one point, with the answers of its searches."""

    point: Point
    prediction: Prediction
    largest: Mapping[str, int | None]
    """`max_batch` and `max_seq_len`, if they were asked for; None if nothing limits them, or nothing is known."""
    bounded_by: Mapping[str, str]
    """What limits a search if it is not memory, by the search's key."""

    def to_json(self) -> dict[str, Any]:
        """Return one row of `predictions` (docs/plan.md)."""
        row = {**self.prediction.to_json(), "workload": self.point.workload, "preset": self.point.preset}
        row["config"] = dict(self.point.config)
        row["run"] = {name: value for name, value in self.point.run.items() if name != "device"}
        return {**row, "bounded_by": dict(self.bounded_by), **self.largest}


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """What training steps need: one prediction per point and device."""

    planned: tuple[Planned, ...]
    """Every point on every device, with the answers of searches."""

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


def plan_points(
    workload: Workload[Any],
    points: Sequence[Point],
    devices: Sequence[Device | None],
    *,
    fsdp: int | None = None,
    searches: Sequence[str] = (),
    on_line: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Return the plan of every point on every device; `on_line` receives what is being planned."""
    if fsdp is not None and not 2 <= fsdp <= MOST_RANKS:
        raise UsageError(f"fsdp={fsdp}: the number of ranks must be from 2 to {MOST_RANKS}. For one, leave it out")
    planner = Planner(workload, fsdp)

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
            search = Search(knob, lambda value: predict(point, device, **{knob: value}))  # noqa: B023  used right here
            largest[key], reason = search.run(int(point.config[knob]))
            bounded_by |= {} if reason is None else {key: reason}
        return Planned(point, prediction, largest, bounded_by)

    return Plan(tuple(planned(point, device) for point in points for device in devices))
