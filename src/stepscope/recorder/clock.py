"""Splits a step's time into consecutive phases, on the host and on the device.

Each phase begins where the previous one ends, so the phases always sum to the step. On a GPU each switch also records
a CUDA event on the current stream. Events are read many steps later: nothing here synchronizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
OTHER = "other"
# The time before a forward. Without a DataLoader it is the data phase; with one it is other work. The reader decides,
# because only the end of the run shows whether there was a DataLoader.
BEFORE_FORWARD = "before_forward"
# The time before a backward that no forward precedes: the forward of a compiled function, or of no module.
BEFORE_BACKWARD = "before_backward"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER)


def name_between(following: str | None) -> str:
    """Return the name of the time between two phases, given the phase that follows."""
    return {FORWARD: BEFORE_FORWARD, BACKWARD: BEFORE_BACKWARD}.get(following or "", OTHER)


@dataclass
class TimedStep:
    """One finished step: nanoseconds by phase, and the CUDA events that have not been read yet."""

    index: int
    start_ns: int
    wall_ns: int
    host_ns: dict[str, int]
    first_event: Any = None
    events: list[tuple[str, Any]] = field(default_factory=list)
    loss: Any = None

    def joined(self, following: TimedStep) -> TimedStep:
        """Return this step and the next one as a single step, with host times only."""
        names = {**self.host_ns, **following.host_ns}
        host_ns = {name: self.host_ns.get(name, 0) + following.host_ns.get(name, 0) for name in names}
        return TimedStep(self.index, self.start_ns, self.wall_ns + following.wall_ns, host_ns)


class Clock:
    """Splits time into phases with `begin_step`, any number of `switch`, and `end_step`.

    While a trace window is open, `on_range(label or None)` is called at each switch.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self.label: str | None = None  # None between two phases
        self._cut_ns = now()
        self._start_ns = self._cut_ns
        self._host_ns: dict[str, int] = {}
        self._device: int | None = None
        self._events: list[tuple[str, Any]] = []
        self._first_event: Any = None
        self._pool: list[Any] = []
        self.on_range: Callable[[str | None], None] | None = None

    def use_device(self, device_index: int) -> None:
        """Record CUDA events on this device, starting with the next step."""
        self._device = device_index

    def switch(self, label: str | None) -> None:
        """End the current phase and begin `label`."""
        current = self.label
        if label == current:
            return
        self._cut(current or name_between(label))
        self.label = label
        if self.on_range is not None:
            self.on_range(label)

    def begin_step(self) -> None:
        """Start a step."""
        self._host_ns = {}
        self._events = []
        self._first_event = None if self._device is None else self._record()
        self._cut_ns = self._start_ns = self._now()

    def end_step(self, index: int) -> TimedStep:
        """End the current phase and return the step."""
        if not self._cut(self.label or OTHER):
            self._first_event = None  # a step that ends inside a graph capture has no device time
        wall_ns = self._cut_ns - self._start_ns
        return TimedStep(index, self._start_ns, wall_ns, self._host_ns, self._first_event, self._events)

    def _cut(self, name: str) -> bool:
        """Add the time since the last cut to `name`, and return whether the device's clock was cut too."""
        now = self._now()
        self._host_ns[name] = self._host_ns.get(name, 0) + now - self._cut_ns
        self._cut_ns = now
        event = None if self._first_event is None else self._record()
        if event is not None:
            self._events.append((name, event))
        return event is not None

    def _record(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None  # a timing event must not be recorded into a graph
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def recycle(self, step: TimedStep) -> None:
        """Reuse the events of a step that has been read."""
        if step.first_event is not None:
            self._pool.append(step.first_event)
            self._pool.extend(event for _, event in step.events)


def read_device_ns(step: TimedStep) -> dict[str, int] | None:
    """Return device nanoseconds by phase once all events have completed, or None without a GPU."""
    if step.first_event is None:
        return None
    device_ns: dict[str, int] = {}
    previous = step.first_event
    for label, event in step.events:
        device_ns[label] = device_ns.get(label, 0) + round(previous.elapsed_time(event) * 1e6)
        previous = event
    return device_ns
