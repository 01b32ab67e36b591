"""Splits a step's time into consecutive phases, on the host and on the device.

Each phase begins where the previous one ends, so the phases always sum to the step. On a GPU each switch also records
a CUDA event on the current stream. Events are read many steps later: nothing here synchronizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
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

# What a loop does between its training steps.
LOADER_START = "loader_start"  # making a DataLoader's iterator and waiting for its first batch
EVALUATION = "evaluation"
ROLLOUT = "rollout"
CHECKPOINT = "checkpoint"
LOGGING = "logging"
GARBAGE = "garbage_collection"
BETWEEN_STEPS = (LOADER_START, EVALUATION, ROLLOUT, CHECKPOINT, LOGGING, GARBAGE)
# A forward with gradients on in evaluation mode, or in a function that evaluates: training if a backward follows.
FORWARD_IN_EVAL_MODE = "forward_in_eval_mode"
# A forward without gradients of a model that is not trained: a teacher's, unless a batch is fetched after it.
FORWARD_OF_ANOTHER = "forward_of_another_model"
# A forward without gradients in training mode: one of a rollout if what it gave was sampled, else an evaluation.
FORWARD_WITHOUT_GRADIENTS = "forward_without_gradients"
UNATTRIBUTED = "unattributed"  # in free running: from the first forward of a step to its end

_PASSES = (FORWARD, BACKWARD, OPTIMIZER, UNATTRIBUTED)
_PARTS_OF_STEPS = frozenset((DATA, OTHER, BEFORE_FORWARD, BEFORE_BACKWARD, *_PASSES))
_NAMES_BETWEEN = {FORWARD: BEFORE_FORWARD, UNATTRIBUTED: BEFORE_FORWARD, BACKWARD: BEFORE_BACKWARD}
_FETCHES = (DATA, LOADER_START)
_UNTRAINED = (EVALUATION, ROLLOUT)
_AFTER_STEPS = (*_FETCHES, *_UNTRAINED, FORWARD_IN_EVAL_MODE, FORWARD_OF_ANOTHER, FORWARD_WITHOUT_GRADIENTS)
_SHOWS_NOTHING = (None, *_FETCHES, LOGGING, GARBAGE)


def name_between(following: str | None) -> str:
    """Return the name of the time between two phases, given the phase that follows."""
    return _NAMES_BETWEEN.get(following or "", OTHER)


def name_stretches(labels: Sequence[str | None]) -> list[str]:
    """Return the name of each consecutive stretch of a step; None stands for the time between two phases.

    What surrounds a stretch decides: data that an evaluation fetches belongs to the evaluation, and so does the time
    between two of its forwards, and after the last one until the loop does something else: its metrics.

    >>> name_stretches(["data", None, "evaluation", None, "evaluation", None, "data", None, "forward", "backward"])
    ... # doctest: +NORMALIZE_WHITESPACE
    ['evaluation', 'evaluation', 'evaluation', 'evaluation', 'evaluation', 'evaluation', 'data', 'before_forward',
     'forward', 'backward']

    >>> name_stretches(["forward", "loader_start", "forward", "evaluation", None, "loader_start"])
    ['forward', 'evaluation', 'evaluation', 'evaluation', 'evaluation', 'loader_start']
    """
    unnamed = ROLLOUT if ROLLOUT in labels else EVALUATION
    known = [unnamed if label == FORWARD_WITHOUT_GRADIENTS else label for label in labels]
    for i in range(1, len(known) - 1):
        # A forward goes on after a fetch, until it is known that no backward comes: a metric ended the last step.
        if known[i] in (FORWARD, UNATTRIBUTED) and labels[i - 1] in _FETCHES and labels[i + 1] in _AFTER_STEPS:
            known[i] = None
    followed_by: list[str | None] = [None] * len(known)  # the next stretch that shows what the loop was doing
    following = following_pass = None
    is_fetched_after = False
    for i in range(len(known) - 1, -1, -1):
        followed_by[i] = following
        is_fetched_after |= known[i] in _FETCHES
        if known[i] == FORWARD_IN_EVAL_MODE:
            known[i] = FORWARD if following_pass == BACKWARD else EVALUATION
        elif known[i] == FORWARD_OF_ANOTHER:
            known[i] = EVALUATION if is_fetched_after or following_pass == EVALUATION else FORWARD
        if known[i] not in _SHOWS_NOTHING:
            following = known[i]
            if following != CHECKPOINT:
                following_pass, is_fetched_after = following, False
    names: list[str] = []
    previous: str | None = None
    for i, label in enumerate(known):
        following, adjacent = followed_by[i], known[i + 1] if i + 1 < len(known) else None
        is_fetch = label in _FETCHES
        if label is not None and not is_fetch:
            name = label
            previous = label if label not in _SHOWS_NOTHING else previous
        elif following in _UNTRAINED and (is_fetch or previous in _UNTRAINED or adjacent not in _FETCHES):
            name = following or OTHER
        elif label is not None:
            name = label
        elif previous in _UNTRAINED and (adjacent in _FETCHES or _follows(previous, known[i - 1], adjacent)):
            name = previous or OTHER
        elif previous == following == CHECKPOINT:
            name = CHECKPOINT
        else:
            name = name_between(adjacent)
        names.append(name)
    return names


def _follows(untrained: str | None, before: str | None, adjacent: str | None) -> bool:
    """Return whether the time between two stretches is the rest of an evaluation: it comes right after its forward.

    A batch that is made without a DataLoader counts too; an evaluation takes far longer.
    """
    return untrained == before == EVALUATION and adjacent is not None


@dataclass
class TimedStep:
    """One finished step: nanoseconds by phase, and the CUDA events that have not been read yet."""

    index: int
    start_ns: int
    wall_ns: int
    host_ns: dict[str, int]
    num_times: dict[str, int] = field(default_factory=dict)
    """How many separate times the loop did each of BETWEEN_STEPS."""
    first_event: Any = None
    events: list[tuple[str, Any]] = field(default_factory=list)
    loss: Any = None
    losses: list[Any] = field(default_factory=list)
    """Those passed to each backward; None for one that is not a number."""

    def joined(self, following: TimedStep) -> TimedStep:
        """Return this step and the next one as a single step, with host times only."""
        parts = (self.host_ns, following.host_ns), (self.num_times, following.num_times)
        host_ns, num_times = ({name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}} for a, b in parts)
        return TimedStep(self.index, self.start_ns, self.wall_ns + following.wall_ns, host_ns, num_times)


class _Stretch:
    """The time between two cuts."""

    __slots__ = ("event", "label", "name", "ns")

    def __init__(self, label: str | None, name: str, ns: int, event: Any) -> None:
        self.label = label
        self.name = name
        self.ns = ns
        self.event = event


def _name_all(stretches: list[_Stretch]) -> tuple[dict[str, int], dict[str, int]]:
    """Name the stretches of a whole step. Return nanoseconds by name, and how often each between steps was done."""
    host_ns: dict[str, int] = {}
    num_times: dict[str, int] = {}
    going_on: set[str] = set()  # what was begun since the last pass: a log line does not end an evaluation
    for name, stretch in zip(name_stretches([stretch.label for stretch in stretches]), stretches):
        stretch.name = name
        host_ns[name] = host_ns.get(name, 0) + stretch.ns
        if name in BETWEEN_STEPS:
            num_times[name] = num_times.get(name, 0) + (name not in going_on)
            going_on.add(name)
        elif name in _PASSES:
            going_on.clear()
    return host_ns, num_times


class Clock:
    """Splits time into phases with `begin_step`, any number of `switch`, and `end_step`.

    While a trace window is open, `on_range(label or None)` is called at each switch.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = self._real_now = now
        self.label: str | None = None  # None between two phases
        self._cut_ns = now()
        self._start_ns = self._cut_ns
        self._stretches: list[_Stretch] = []
        self._device: int | None = None
        self._first_event: Any = None
        self._pool: list[Any] = []
        self._is_cutting = False
        self.on_range: Callable[[str | None], None] | None = None

    def use_device(self, device_index: int | None) -> None:
        """Record CUDA events on this device, or none, starting with the next step."""
        self._device = device_index

    def switch(self, label: str | None) -> None:
        """End the current phase and begin `label`."""
        current = self.label
        # A garbage collection can begin at any line, also at one of ours.
        if label == current or self._is_cutting:
            return
        self._cut(label)
        self.label = label
        if self.on_range is not None:
            self.on_range(label)

    def begin_step(self) -> None:
        """Start a step."""
        self._stretches = []
        self._first_event = None if self._device is None else self._record()
        self._cut_ns = self._start_ns = self._now()

    @property
    def start_ns(self) -> int:
        """When the open step began."""
        return self._start_ns

    def stand_at(self, ns: int | None) -> None:
        """Take this as the current time, for events that were noted then. None goes on with the real time."""
        self._now = self._real_now if ns is None else lambda: ns

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the recorder's own work inside out of the open step."""
        begun_ns = self._real_now()
        yield
        ns = self._real_now() - begun_ns
        self._cut_ns += ns
        self._start_ns += ns

    def end_step(self, index: int) -> TimedStep:
        """End the current phase and return the step."""
        self._cut(None)
        stretches = self._stretches
        first_event = self._first_event
        if first_event is not None and stretches[-1].event is None:
            first_event = None  # a step that ends inside a graph capture has no device time
        host_ns: dict[str, int] = {}
        for stretch in stretches:
            host_ns[stretch.name] = host_ns.get(stretch.name, 0) + stretch.ns
        num_times: dict[str, int] = {}
        if not _PARTS_OF_STEPS.issuperset(host_ns):  # in most steps nothing lies between them
            host_ns, num_times = _name_all(stretches)
        events = [] if first_event is None else [(one.name, one.event) for one in stretches if one.event is not None]
        wall_ns = self._cut_ns - self._start_ns
        return TimedStep(index, self._start_ns, wall_ns, host_ns, num_times, first_event, events)

    def since_last_step(self) -> dict[str, int]:
        """Return the ns of each of BETWEEN_STEPS in the open step so far, as if it ended here."""
        last = _Stretch(self.label, "", self._now() - self._cut_ns, None)
        host_ns, _ = _name_all([copy(stretch) for stretch in (*self._stretches, last)])
        return {name: ns for name, ns in host_ns.items() if name in BETWEEN_STEPS}

    def _cut(self, following: str | None) -> None:
        """End the current stretch here."""
        self._is_cutting = True
        now = self._now()
        event = None if self._first_event is None else self._record()
        label = self.label
        self._stretches.append(_Stretch(label, label or name_between(following), now - self._cut_ns, event))
        self._cut_ns = now
        self._is_cutting = False

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
