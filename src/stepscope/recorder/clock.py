"""Where a step's time goes: consecutive phases, on the host's clock and on the device's.

The clock is cut at each change of phase, so the parts sum to the step by construction. On a
GPU a cut also records one CUDA event on the current stream: it is enqueued, never waited for,
and read many steps later. Nothing here synchronizes.
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
# The stretch that ends where a forward begins. It is the data phase of a loop that has no
# DataLoader; in a loop that has one it is whatever else stands there. The reader decides:
# only at the end is it known whether a DataLoader was there.
BEFORE_FORWARD = "before_forward"
# The stretch that ends where a backward begins and no forward was seen: a compiled function's
# forward, or one that calls no module.
BEFORE_BACKWARD = "before_backward"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER)


def name_between(following: str | None) -> str:
    """What a stretch between the phases is called, by the phase that follows it."""
    return {FORWARD: BEFORE_FORWARD, BACKWARD: BEFORE_BACKWARD}.get(following or "", OTHER)


@dataclass
class TimedStep:
    """One finished step: integer nanoseconds by phase, and the CUDA events still to be read."""

    index: int
    start_ns: int
    wall_ns: int
    host_ns: dict[str, int]
    first_event: Any = None
    events: list[tuple[str, Any]] = field(default_factory=list)
    loss: Any = None

    def joined(self, following: TimedStep) -> TimedStep:
        """This step and the one right after it as one, on the host's clock."""
        names = {**self.host_ns, **following.host_ns}
        host_ns = {name: self.host_ns.get(name, 0) + following.host_ns.get(name, 0) for name in names}
        return TimedStep(self.index, self.start_ns, self.wall_ns + following.wall_ns, host_ns)


class Clock:
    """Cuts time into phases; `begin_step`, any number of `switch`, `end_step`.

    `on_range(label or None)` is called at each cut while a trace window is open.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self.label: str | None = None  # None: between the phases
        self._cut_ns = now()
        self._start_ns = self._cut_ns
        self._host_ns: dict[str, int] = {}
        self._device: int | None = None
        self._events: list[tuple[str, Any]] = []
        self._first_event: Any = None
        self._pool: list[Any] = []
        self.on_range: Callable[[str | None], None] | None = None

    def use_device(self, device_index: int) -> None:
        """Record CUDA events on this device from the next step on."""
        self._device = device_index

    def switch(self, label: str | None) -> None:
        """End the running stretch and begin one that belongs to `label`."""
        current = self.label
        if label == current:
            return
        now = self._now()
        name = current or name_between(label)
        self._host_ns[name] = self._host_ns.get(name, 0) + now - self._cut_ns
        self._cut_ns = now
        self.label = label
        if self._first_event is not None:
            event = self._record()
            if event is not None:
                self._events.append((name, event))
        if self.on_range is not None:
            self.on_range(label)

    def begin_step(self) -> None:
        """Start a step now."""
        self._host_ns = {}
        self._events = []
        self._first_event = None if self._device is None else self._record()
        self._cut_ns = self._start_ns = self._now()

    def end_step(self, index: int) -> TimedStep:
        """Close the running stretch and return the step."""
        now = self._now()
        name = self.label or OTHER
        self._host_ns[name] = self._host_ns.get(name, 0) + now - self._cut_ns
        self._cut_ns = now
        if self._first_event is not None:
            event = self._record()
            if event is None:
                self._first_event = None  # a step that ended inside a graph capture has no device time
            else:
                self._events.append((name, event))
        return TimedStep(index, self._start_ns, now - self._start_ns, self._host_ns, self._first_event, self._events)

    def _record(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None  # a timing event may not be recorded into a graph
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def recycle(self, step: TimedStep) -> None:
        """Take back the events of a step that has been read."""
        if step.first_event is not None:
            self._pool.append(step.first_event)
            self._pool.extend(event for _, event in step.events)


def read_device_ns(step: TimedStep) -> dict[str, int] | None:
    """Device nanoseconds by phase of a step whose events have all completed; None without a GPU."""
    if step.first_event is None:
        return None
    device_ns: dict[str, int] = {}
    previous = step.first_event
    for label, event in step.events:
        device_ns[label] = device_ns.get(label, 0) + round(previous.elapsed_time(event) * 1e6)
        previous = event
    return device_ns
