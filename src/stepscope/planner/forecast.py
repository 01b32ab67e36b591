"""Forecasts the memory of a tuning's points, so that points that cannot fit are not run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stepscope.devices.limits import find_device
from stepscope.errors import UsageError
from stepscope.formatting import safe, size
from stepscope.planner.hardware import CONTEXT_BYTES, hardware_of, usable_bytes
from stepscope.planner.prediction import TOO_LARGE, Planner
from stepscope.sweep.grid import Point
from stepscope.sweep.memory import SPARE_SHARE, available_bytes
from stepscope.sweep.tuning.space import BATCH, COMPILE
from stepscope.sweep.tuning.trials import Forecast, memory_bytes
from stepscope.workloads.users_code import users_code
from stepscope.workloads.workload import Workload

NEAR = 8
"""A plan takes seconds. It is made if this many times the peak of the defaults, scaled by batch, might not fit."""
MOST_FAILURES = 2  # after this many failed plans, no more are tried


class Forecaster:
    """Forecasts points: None if a forecast is not needed or not possible."""

    def __init__(
        self, workload: Workload[Any], budget_bytes: int | None, environments: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """`environments` are those of the results' folder, by hash; the device is that of the first row."""
        self._planner = Planner(workload)
        self._budget_bytes, self._environments = budget_bytes, environments
        self._num_failures = 0
        self.notes: dict[str, None] = {}

    def __call__(self, point: Point, defaults: Mapping[str, Any] | None) -> Forecast | None:
        """Return the forecast of a point; device and scale come from the row of the defaults."""
        if defaults is None or point.run[COMPILE] != "off" or self._num_failures >= MOST_FAILURES:
            return None  # planning a compiled program takes as long as compiling it
        device, room_bytes = None, self._budget_bytes
        if point.run["device"] == "cuda":
            name = self._environments.get(defaults.get("environment_hash", ""), {}).get("device_name")
            device = find_device(str(name))
            if device is None or hardware_of(device) is None:
                self.notes[f"{name} cannot be planned: points that do not fit are found by running them"] = None
                return None
            if room_bytes is None:
                room_bytes = usable_bytes(device)[0]
            else:
                device = dataclasses.replace(device, visible_bytes=room_bytes + CONTEXT_BYTES)
        elif room_bytes is None:
            available = available_bytes()
            room_bytes = None if available is None else int(available * (1 - SPARE_SHARE))
        peak = memory_bytes(defaults) if defaults["status"] == "ok" else None
        share = point.config[BATCH] / defaults["config"][BATCH] if BATCH in point.config else 1.0
        if room_bytes is None or (peak is not None and NEAR * peak * max(1.0, float(share)) <= room_bytes):
            return None
        try:
            with users_code():
                found = self._planner.predict(point, device)
        except UsageError as error:
            self._num_failures += 1
            self.notes[safe(f"not planned: {error}", 300)] = None
            return None
        peak = found.peak_allocated_bytes if found.peak_reserved_bytes is None else found.peak_reserved_bytes
        fits = peak <= room_bytes if device is None else found.fits != TOO_LARGE
        reason = f"its plan needs {size(peak)}, and {size(room_bytes)} are available"
        return Forecast(peak_bytes=peak, fits=fits, reason=None if fits else reason)
