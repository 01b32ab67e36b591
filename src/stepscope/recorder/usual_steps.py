"""The cheap way to record a loop that only trains: its hooks note events, which are interpreted later, many at once.

A usual step fetches data, calls a model in training mode with gradients on, runs a backward after each forward, and
ends with the one optimizer, or after it with `stepscope.step()`. Whatever else happens goes the long way through
`Loop`, after all that was noted before.
"""

import time
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn

from stepscope.recorder.clock import BEFORE_FORWARD, DATA, OTHER, UNATTRIBUTED, Clock
from stepscope.recorder.history.losses import LossSampler
from stepscope.recorder.model import batch_size
from stepscope.recorder.modes import unseen
from stepscope.recorder.step_ends import EXPLICIT, StepFinder
from stepscope.recorder.step_facts import Forward, Inputs, is_known
from stepscope.recorder.values import is_plain

INTERPRET_NS = 250_000_000
# After fewer usual steps in a row than this, the next ones take the long way: twice as many each time, up to a limit.
LEAST_IN_A_ROW, MAX_REST = 8, 64

_FORWARD, _BACKWARD, _BACKWARD_ENDED, _DATA, _DATA_ENDED, _OPTIMIZER, _OPTIMIZER_ENDED, _END = range(8)
_Event = tuple[int, int, Any]  # one of these, when, and what is known about it


class UsualLoop(Protocol):
    """The long way."""

    finder: StepFinder

    def usual_forward(self, forward: Forward, goes_on: bool) -> None: ...
    def backward_begins(self, tensors: Any) -> None: ...
    def backward_ended(self) -> None: ...
    def data_begins(self, starts: bool) -> None: ...
    def data_ended(self) -> None: ...
    def usual_optimizer_begins(self, optimizer: int) -> None: ...
    def usual_optimizer_ended(self) -> None: ...
    def usual_step_ended(self, owner: Any) -> None: ...


class UsualSteps:
    """Notes the events of usual steps while `is_on`. The methods for what begins return whether it is usual."""

    def __init__(self, loop: UsualLoop, clock: Clock) -> None:
        self.is_on = False
        self.is_inside = False
        """Whether a forward or a backward runs: all that is called there is part of it."""
        self.in_full = False
        """Whether each phase is noted with its loss, and each step interpreted when it ends."""
        self.is_interpreting = False
        self.step_ended: Callable[[int, int, dict[str, int], tuple[int, int, int]], None]
        """Called with the start, end, phases and batch of each step that was interpreted the short way."""
        self.interpreted: Callable[[], None]
        """Called at the end of a step when all that was noted has been interpreted."""
        self.losses: LossSampler | None = None
        """Samples the losses of free running."""
        self._loop, self._clock = loop, clock
        self._events: list[_Event] = []
        self._inputs: Inputs = []  # of the open step
        self._thread: int | None = None
        self._optimizer: Callable[[], Any] = lambda: None
        self._owner: Any = None  # the number of the optimizer that ends a step, or EXPLICIT
        self._waits = self._fetches = self._steps = False  # for a backward, for data, inside the optimizer
        self._due_ns = self._num_left = 0
        self._num_in_a_row = self._rest = self._num_rested = 0

    def start(self, thread: int | None, optimizer: Any, owner: Any, in_full: bool, most_steps: int) -> None:
        """Note events from here, the beginning of a step; interpret them after `most_steps` at the latest."""
        if self._num_rested < self._rest:
            self._num_rested += 1
            return
        self.is_on = True
        self._thread, self._owner, self.in_full = thread, owner, in_full
        self._optimizer = weakref.ref(optimizer)
        self._num_left = most_steps
        self._due_ns = 0 if in_full else time.perf_counter_ns() + INTERPRET_NS

    def forward_begins(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._waits or not root.training or not torch.is_grad_enabled() or get_ident() != self._thread:
            return False
        now = time.perf_counter_ns()
        self.is_inside = self._waits = True
        key, seen, was_seen = id(root), None, False
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, torch.Tensor):
            if self._inputs:
                look = is_known if type(given) is torch.Tensor else partial(unseen, is_known)
                was_seen = look(given, key, self._inputs)
            seen = weakref.ref(given)
            self._inputs.append((seen, key))
        forward = key, weakref.ref(root), batch_size(args, kwargs), seen, was_seen
        self._events.append((_FORWARD, now, forward))
        return True

    def forward_ended(self) -> bool:
        self.is_inside = False
        return self.is_on  # or something unusual has happened inside

    def backward_begins(self, tensors: Any) -> bool:
        if not self._waits or self.is_inside or get_ident() != self._thread:
            return False
        self.is_inside, self._waits = True, False
        loss = None
        if self.in_full and isinstance(tensors, torch.Tensor):
            loss = _loss(tensors) if type(tensors) is torch.Tensor else unseen(_loss, tensors)
        else:
            self.sample_loss(tensors)
        self._events.append((_BACKWARD, time.perf_counter_ns(), loss))
        return True

    def sample_loss(self, loss: Any) -> None:
        if self.losses is not None and self.losses.is_due:
            self.losses.take(loss)

    def backward_ended(self, _has_returned: bool) -> None:
        self.is_inside = False
        if not self.is_on:
            self._loop.backward_ended()
        elif self.in_full:
            self._events.append((_BACKWARD_ENDED, time.perf_counter_ns(), None))

    def data_begins(self, starts: bool) -> bool:
        if self.is_inside or self._fetches or self._steps or get_ident() != self._thread:
            return False
        self._fetches = True
        self._events.append((_DATA, time.perf_counter_ns(), starts))
        return True

    def data_ended(self, _has_returned: bool) -> None:
        self._fetches = False
        if self.is_on:
            self._events.append((_DATA_ENDED, time.perf_counter_ns(), None))
        else:
            self._loop.data_ended()

    def optimizer_begins(self, optimizer: Any) -> bool:
        if self._steps or self.is_inside or optimizer is not self._optimizer() or get_ident() != self._thread:
            return False
        self._steps = True
        if self.in_full:
            self._events.append((_OPTIMIZER, time.perf_counter_ns(), id(optimizer)))
        return True

    def optimizer_ended(self, optimizer: Any) -> bool:
        if not self._steps or self.is_inside or optimizer is not self._optimizer() or get_ident() != self._thread:
            return False
        self._steps = False
        if self._owner == EXPLICIT:
            if self.in_full:
                self._events.append((_OPTIMIZER_ENDED, time.perf_counter_ns(), None))
        else:
            self._end()
        return True

    def explicit_step(self) -> bool:
        is_busy = self._waits or self._fetches or self._steps or self.is_inside
        if self._owner != EXPLICIT or is_busy or get_ident() != self._thread:
            return False
        self._end()
        return True

    def _end(self) -> None:
        now = time.perf_counter_ns()
        self._events.append((_END, now, self._owner))
        self._waits = False
        self._inputs.clear()
        self._num_in_a_row += 1
        self._num_left -= 1
        if now >= self._due_ns or self._num_left <= 0:
            self._interpret()
            self.interpreted()

    def stop(self) -> None:
        """Tell the loop all that was noted. The open step goes on the long way."""
        self._rest = 0 if self._num_in_a_row >= LEAST_IN_A_ROW else min(MAX_REST, 2 * self._rest + 1)
        self._num_in_a_row = self._num_rested = 0
        self._interpret()
        optimizer = self._optimizer()
        if self._steps and not self.in_full and optimizer is not None:
            self._loop.usual_optimizer_begins(id(optimizer))
        self.forget()

    def forget(self) -> None:
        """Note nothing from here on."""
        self.is_on = self.is_inside = self._waits = self._fetches = self._steps = False
        self._events.clear()
        self._inputs.clear()

    def _interpret(self) -> None:
        self.is_on, self.is_interpreting = False, True
        events, self._events = self._events, []
        try:
            with self._clock.stopped():
                first = num_short = 0
                for i in [i for i, event in enumerate(events) if event[0] == _END]:
                    step = events[first : i + 1]
                    is_short = not self.in_full and self._interpret_free_step(step)
                    if not is_short:
                        self._replay(step)
                    num_short += is_short
                    first = i + 1
                self._loop.finder.saw_again(self._owner, num_short)
                self._replay(events[first:])
        finally:
            self._clock.stand_at(None)
            self.is_interpreting = False

    def _interpret_free_step(self, events: list[_Event]) -> bool:
        """Sum up a step of one model. What this does not understand is replayed."""
        start_ns = cut_ns = self._clock.start_ns
        label: str | None = None
        around: str | None = None
        host_ns: dict[str, int] = {}
        num_tokens = num_samples = num_passes = 0
        waiting: Forward | None = None
        first_key = None
        following: str | None
        for kind, ns, what in events:
            if kind == _BACKWARD:
                if waiting is not None and not waiting[4]:
                    num_tokens += waiting[2].num_tokens or 0
                    num_samples += waiting[2].num_samples or 0
                    num_passes += 1
                waiting = None
                continue
            if kind == _FORWARD:
                if waiting is not None or first_key not in (None, what[0]):
                    return False
                waiting, first_key = what, what[0]
                if label == UNATTRIBUTED:
                    continue
                name, following = label or BEFORE_FORWARD, UNATTRIBUTED
            elif kind == _DATA:
                if what:
                    return False  # a DataLoader starts
                name, following, around = label or OTHER, DATA, label
            elif kind == _DATA_ENDED:
                name, following = DATA, around
            else:
                name, following = label or OTHER, None
            host_ns[name] = host_ns.get(name, 0) + ns - cut_ns
            cut_ns, label = ns, following
        if waiting is not None:
            return False
        self.step_ended(start_ns, cut_ns, host_ns, (num_tokens, num_samples, num_passes))
        self._clock.stand_at(cut_ns)
        self._clock.begin_step()
        return True

    def _replay(self, events: list[_Event]) -> None:
        """Tell the loop what happened, with its clock set to when it did."""
        loop = self._loop
        for i, (kind, ns, what) in enumerate(events):
            goes_on = self.is_inside and i == len(events) - 1
            self._clock.stand_at(ns)
            if kind == _FORWARD:
                loop.usual_forward(what, goes_on)
            elif kind == _BACKWARD:
                loop.backward_begins(what)
                if not self.in_full and not goes_on:
                    loop.backward_ended()
            elif kind == _BACKWARD_ENDED:
                loop.backward_ended()
            elif kind == _DATA:
                loop.data_begins(what)
            elif kind == _DATA_ENDED:
                loop.data_ended()
            elif kind == _OPTIMIZER:
                loop.usual_optimizer_begins(what)
            elif kind == _OPTIMIZER_ENDED:
                loop.usual_optimizer_ended()
            else:
                loop.usual_step_ended(what)


def _loss(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.detach() if is_plain(tensor) and tensor.numel() == 1 else None
