"""The cheap way to record a loop that only trains: its hooks note events, which are interpreted later, many at once.

A usual step fetches data, calls a model in training mode with gradients on, runs a backward after each forward, and
ends with the one optimizer, or after it with `stepscope.step()`. Whatever else happens goes the long way through
`Loop`, after all that was noted before.

After milliseconds of computation, nothing of ours is in the core's caches, and each function called costs
microseconds. So what runs in each step is one function per hook, and the writer's thread adds up the steps.
"""

from collections.abc import Callable, Iterator
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, is_grad_enabled, nn

from stepscope.recorder.clock import Clock
from stepscope.recorder.history.losses import LossSampler
from stepscope.recorder.history.noted import (
    BACKWARD,
    BACKWARD_ENDED,
    DATA,
    DATA_ENDED,
    END,
    FORWARD,
    OPTIMIZER,
    OPTIMIZER_ENDED,
    Event,
    UsualStep,
    usual_steps,
)  # fmt: skip
from stepscope.recorder.model import BatchSize, batch_size
from stepscope.recorder.modes import is_traced, unseen, without_subclasses
from stepscope.recorder.step_ends import EXPLICIT, StepFinder
from stepscope.recorder.step_facts import Forward, Inputs, is_known
from stepscope.recorder.values import is_plain
from stepscope.recorder.wall import failed

INTERPRET_NS = 250_000_000
INTERPRET_IN_FULL_NS = 100_000_000  # what a kill can cost of the clean window
# After fewer usual steps in a row than this, the next ones take the long way: twice as many each time, up to a limit.
LEAST_IN_A_ROW, MAX_REST = 8, 64

Hook = Callable[[Any, Any, Any], None]


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

    __slots__ = (
        *("_clock", "_due_ns", "_events", "_fetches", "_first_of_step", "_inputs", "_is_explicit", "_is_odd"),
        *("_loop", "_most_steps", "_num_in_a_row", "_num_noted", "_num_odd", "_num_rested", "_optimizer", "_owner"),
        *("_rest", "_root", "_steps", "_thread", "_waits", "in_full", "interpreted", "is_inside", "is_interpreting"),
        *("_shapes", "_size", "_wants_loss", "is_on", "losses", "steps_ended"),
    )

    def __init__(self, loop: UsualLoop, clock: Clock) -> None:
        self.is_on = False
        self.is_inside = False
        """Whether a forward or a backward runs: all that is called there is part of it."""
        self.in_full = False
        """Whether each phase is noted with its loss, and every step replayed."""
        self.is_interpreting = False
        self.steps_ended: Callable[[int, int, Iterator[UsualStep]], None]
        """Called with their number, the length of the last, and the steps, which another thread may go through."""
        self.interpreted: Callable[[], None]
        """Called at the end of a step when all that was noted has been interpreted."""
        self.losses: LossSampler | None = None
        """Samples the losses of free running."""
        self._loop, self._clock = loop, clock
        self._events: list[Event] = []
        self._inputs: Inputs = []  # of the open step
        self._thread: int | None = None
        self._optimizer: Callable[[], Any] = lambda: None
        self._owner: Any = None  # the number of the optimizer that ends a step, or EXPLICIT
        self._is_explicit = False
        self._waits = self._fetches = self._steps = False  # for a backward, for data, inside the optimizer
        self._root: int | None = None  # the model of the open step
        self._is_odd = False  # whether the open step has to be replayed
        self._num_noted = self._num_odd = 0  # steps
        self._first_of_step = 0  # event of the open step
        self._due_ns = self._most_steps = 0
        self._num_in_a_row = self._rest = self._num_rested = 0
        self._wants_loss = False  # the next backward's, or all
        # The inputs of the last forward, and their size: comparing them takes less than looking it up.
        self._shapes: list[Any] | None = None
        self._size = BatchSize(None, None)

    def start(self, thread: int | None, optimizer: Any, owner: Any, in_full: bool, most_steps: int) -> None:
        """Note events from here, the beginning of a step; interpret them after `most_steps` at the latest."""
        if self._num_rested < self._rest:
            self._num_rested += 1
            return
        self.is_on = True
        self._thread, self._owner, self.in_full = thread, owner, in_full
        self._wants_loss = in_full or (self.losses is not None and self.losses.is_due)
        self._is_explicit = owner == EXPLICIT
        self._optimizer = ref(optimizer)
        self._most_steps = most_steps
        self._due_ns = perf_counter_ns() + (INTERPRET_IN_FULL_NS if in_full else INTERPRET_NS)

    def forward_begins(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._waits or not root.training or not is_grad_enabled() or get_ident() != self._thread:
            return False
        now = perf_counter_ns()
        self.is_inside = self._waits = True
        key, seen, was_seen = id(root), None, False
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, Tensor):
            seen = ref(given)
            if self._inputs:
                with without_subclasses():
                    was_seen = is_known(given, key, self._inputs)
            self._inputs.append((seen, key))
        if self._root is None:
            self._root = key
        elif self._root != key:
            self._is_odd = True
        shapes: list[Any] = [*kwargs]
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) is Tensor:
                shapes += value.shape, value.dtype
            else:
                shapes.append(value if value is None or type(value) is int else object())  # like no other
        if shapes != self._shapes:
            self._shapes, self._size = shapes, batch_size(args, kwargs)
        self._events.append((FORWARD, now, (key, ref(root), self._size, seen, was_seen)))
        return True

    def around_backward(self, original: Callable[..., Any], long_way: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of `torch.autograd.backward`."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            if (
                is_traced()
                or not self._waits
                or not self.is_on
                or self.is_inside
                or self._wants_loss
                or get_ident() != self._thread
            ):
                return long_way(*args, **kwargs)
            self.is_inside, self._waits = True, False
            self._events.append((BACKWARD, perf_counter_ns(), None))
            try:
                return original(*args, **kwargs)
            finally:
                self.is_inside = False
                if not self.is_on:
                    _guarded(self._loop.backward_ended)  # type: ignore[unreachable]  # the call changes it

        return backward

    def backward_begins(self, tensors: Any) -> bool:
        if not self._waits or self.is_inside or get_ident() != self._thread:
            return False
        self.is_inside, self._waits = True, False
        loss = None
        if self.in_full and isinstance(tensors, Tensor):
            loss = _loss(tensors) if type(tensors) is Tensor else unseen(_loss, tensors)
        else:
            self.sample_loss(tensors)
        self._events.append((BACKWARD, perf_counter_ns(), loss))
        return True

    def sample_loss(self, loss: Any) -> None:
        if self.losses is not None and self.losses.is_due:
            self._wants_loss = False
            self.losses.take(loss)

    def backward_ended(self, _has_returned: bool) -> None:
        self.is_inside = False
        if not self.is_on:
            self._loop.backward_ended()
        elif self.in_full:
            self._events.append((BACKWARD_ENDED, perf_counter_ns(), None))

    def around_data(self, original: Callable[..., Any], long_way: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of a DataLoader's `__next__`."""

        def fetch(iterator: Any) -> Any:
            if (
                is_traced()
                or not self.is_on
                or self.is_inside
                or self._fetches
                or self._steps
                or get_ident() != self._thread
                or not getattr(iterator, "_num_yielded", 0)
            ):
                return long_way(iterator)
            self._fetches = True
            self._events.append((DATA, perf_counter_ns(), False))
            try:
                return original(iterator)
            finally:
                self._fetches = False
                if self.is_on:
                    self._events.append((DATA_ENDED, perf_counter_ns(), None))
                else:
                    _guarded(self._loop.data_ended)  # type: ignore[unreachable]  # the call changes it

        return fetch

    def data_begins(self, starts: bool) -> bool:
        if self.is_inside or self._fetches or self._steps or get_ident() != self._thread:
            return False
        self._fetches = True
        self._is_odd |= starts
        self._events.append((DATA, perf_counter_ns(), starts))
        return True

    def data_ended(self, _has_returned: bool) -> None:
        self._fetches = False
        if self.is_on:
            self._events.append((DATA_ENDED, perf_counter_ns(), None))
        else:
            self._loop.data_ended()

    def optimizer_hooks(self, long_begins: Hook, long_ended: Hook) -> tuple[Hook, Hook]:
        """Return the hooks before and after each step of an optimizer."""

        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_traced():
                return
            if (
                not self.is_on
                or self._steps
                or self.is_inside
                or optimizer is not self._optimizer()
                or get_ident() != self._thread
            ):
                long_begins(optimizer, args, kwargs)
                return
            self._steps = True
            if self.in_full:
                self._events.append((OPTIMIZER, perf_counter_ns(), id(optimizer)))

        def ended(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_traced():
                return
            if (
                not self._steps
                or not self.is_on
                or self.is_inside
                or optimizer is not self._optimizer()
                or get_ident() != self._thread
            ):
                long_ended(optimizer, args, kwargs)
                return
            self._steps = False
            try:
                if not self._is_explicit:
                    self._end()
                elif self.in_full:
                    self._events.append((OPTIMIZER_ENDED, perf_counter_ns(), None))
            except Exception as error:
                failed(error)

        return begins, ended

    def explicit_step(self) -> bool:
        is_busy = self._waits or self._fetches or self._steps or self.is_inside
        if is_busy or not self.is_on or not self._is_explicit or get_ident() != self._thread:
            return False
        self._end()
        return True

    def _end(self) -> None:
        now, events = perf_counter_ns(), self._events
        events.append((END, now, is_odd := self._is_odd or self._waits))
        self._waits = self._is_odd = False
        self._root = None
        self._inputs.clear()
        self._num_noted += 1
        self._num_odd += is_odd
        self._first_of_step = len(events)
        if now >= self._due_ns or self._num_noted >= self._most_steps:
            _guarded(self._interpret_and_go_on)

    def _interpret_and_go_on(self) -> None:
        self._interpret()
        self.interpreted()

    def stop(self) -> None:
        """Tell the loop all that was noted. The open step goes on the long way."""
        num_in_a_row = self._num_in_a_row + self._num_noted
        self._rest = 0 if num_in_a_row >= LEAST_IN_A_ROW else min(MAX_REST, 2 * self._rest + 1)
        self._interpret()
        self._num_in_a_row = self._num_rested = 0
        optimizer = self._optimizer()
        if self._steps and not self.in_full and optimizer is not None:
            self._loop.usual_optimizer_begins(id(optimizer))
        self.forget()

    def forget(self) -> None:
        """Note nothing from here on."""
        self.is_on = self.is_inside = self._waits = self._fetches = self._steps = False
        self._take()
        self._inputs.clear()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        self._num_in_a_row += self._num_noted
        self._num_noted = self._num_odd = self._first_of_step = 0
        self._root, self._is_odd = None, False
        return events

    def _interpret(self) -> None:
        self.is_on, self.is_interpreting = False, True
        num_noted, num_odd, first = self._num_noted, self._num_odd, self._first_of_step
        events = self._take()
        try:
            with self._clock.stopped():
                if self.in_full or num_odd:
                    num_short = self._interpret_each(events[:first])
                else:
                    num_short = num_noted
                    self._hand_over(events[:first], num_noted)
                self._loop.finder.saw_again(self._owner, num_short)
                self._replay(events[first:])
        finally:
            self._clock.stand_at(None)
            self.is_interpreting = False

    def _interpret_each(self, events: list[Event]) -> int:
        """Hand over steps that are as usual, and replay the others. Return how many were as usual."""
        first = num_short = 0
        for i in [i for i, event in enumerate(events) if event[0] == END]:
            step = events[first : i + 1]
            if self.in_full or step[-1][2]:
                self._replay(step)
            else:
                self._hand_over(step, 1)
                num_short += 1
            first = i + 1
        return num_short

    def _hand_over(self, events: list[Event], num_steps: int) -> None:
        if num_steps:
            start_ns, end_ns = self._clock.start_ns, events[-1][1]
            last_ns = end_ns - next((ns for kind, ns, _ in reversed(events[:-1]) if kind == END), start_ns)
            self.steps_ended(num_steps, last_ns, usual_steps(start_ns, events))
            self._clock.stand_at(end_ns)
            self._clock.begin_step()

    def _replay(self, events: list[Event]) -> None:
        """Tell the loop what happened, with its clock set to when it did."""
        loop = self._loop
        for i, (kind, ns, what) in enumerate(events):
            goes_on = self.is_inside and i == len(events) - 1
            self._clock.stand_at(ns)
            if kind == FORWARD:
                loop.usual_forward(what, goes_on)
            elif kind == BACKWARD:
                loop.backward_begins(what)
                if not self.in_full and not goes_on:
                    loop.backward_ended()
            elif kind == BACKWARD_ENDED:
                loop.backward_ended()
            elif kind == DATA:
                loop.data_begins(what)
            elif kind == DATA_ENDED:
                loop.data_ended()
            elif kind == OPTIMIZER:
                loop.usual_optimizer_begins(what)
            elif kind == OPTIMIZER_ENDED:
                loop.usual_optimizer_ended()
            else:
                loop.usual_step_ended(self._owner)


def _loss(tensor: Tensor) -> Tensor | float | None:
    if not is_plain(tensor) or tensor.numel() != 1:
        return None
    return tensor.item() if tensor.device.type == "cpu" else tensor.detach()  # scripts add to a loss in place


def _guarded(function: Callable[[], None]) -> None:
    try:
        unseen(function)
    except Exception as error:
        failed(error)
