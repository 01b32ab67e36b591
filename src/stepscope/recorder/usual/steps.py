"""The cheap way to record a loop that only trains: its hooks note events, which are interpreted later, many at once.

A usual step fetches data, calls a model in training mode with gradients on, runs a backward after each forward, and
ends with the one optimizer, or after it with `stepscope.step()`. Whatever else happens goes the long way through
`Loop`, after all that was noted before.

After milliseconds of computation, nothing of ours is in the core's caches, and each function called costs
microseconds. So a hook runs little (`notes.py`), and the writer's thread adds up the steps.
"""

from collections.abc import Callable, Iterator
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from stepscope.recorder.between_steps import Between
from stepscope.recorder.clock import Clock
from stepscope.recorder.history.losses import LossSampler
from stepscope.recorder.modes import is_traced, num_dispatch_modes, num_function_modes, unseen
from stepscope.recorder.step_ends import EXPLICIT, StepFinder
from stepscope.recorder.step_facts import Forward
from stepscope.recorder.usual.events import (
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
from stepscope.recorder.usual.notes import Notes
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
    between: Between

    def usual_forward(self, forward: Forward, goes_on: bool) -> None: ...
    def backward_begins(self, tensors: Any) -> None: ...
    def backward_ended(self) -> None: ...
    def data_begins(self, starts: bool) -> None: ...
    def data_ended(self) -> None: ...
    def usual_optimizer_begins(self, optimizer: int) -> None: ...
    def usual_optimizer_ended(self) -> None: ...
    def usual_step_ended(self, owner: Any) -> None: ...


class UsualSteps(Notes):
    """Interprets what is noted of usual steps."""

    __slots__ = (
        *("_clock", "_loop", "_num_backwards", "_num_in_a_row", "_num_rested", "_owner", "_rest"),
        *("interpreted", "is_interpreting", "losses", "steps_ended"),
    )

    def __init__(self, loop: UsualLoop, clock: Clock) -> None:
        super().__init__()
        self.is_interpreting = False
        self.steps_ended: Callable[[int, int, Iterator[UsualStep]], None]
        """Called with their number, the length of the last, and the steps, which another thread may go through."""
        self.interpreted: Callable[[], None]
        """Called at the end of a step when all that was noted has been interpreted."""
        self.losses: LossSampler | None = None
        """Samples the losses of free running."""
        self._loop, self._clock = loop, clock
        self._owner: Any = None  # the number of the optimizer that ends a step, or EXPLICIT
        self._num_in_a_row = self._rest = self._num_rested = 0
        self._num_backwards = 0  # since the beginning of a step, while a loss is wanted

    def start(self, thread: int | None, optimizer: Any, owner: Any, in_full: bool, most_steps: int) -> None:
        """Note events from here, the beginning of a step; interpret them after `most_steps` at the latest."""
        if self._num_rested < self._rest:
            self._num_rested += 1
            return
        self.is_on = True
        self._num_backwards = 0
        self.thread, self._owner, self.in_full = thread or 0, owner, in_full
        self.wants_loss = in_full or (self.losses is not None and self.losses.is_due)
        self.is_explicit = owner == EXPLICIT
        self.optimizer = ref(optimizer)
        self.most_steps = most_steps
        self.due_ns = perf_counter_ns() + (INTERPRET_IN_FULL_NS if in_full else INTERPRET_NS)

    def around_backward(self, original: Callable[..., Any], long_way: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of `torch.autograd.backward`."""
        begins, ended = self.backward_begins, self.backward_ended

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return original(*args, **kwargs)
            try:
                is_usual = begins(args, kwargs)
            except Exception as error:
                failed(error)
                is_usual = False
            if not is_usual:
                return long_way(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                if not ended():
                    _guarded(self._loop.backward_ended)

        return backward

    def loss_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | float | None:
        """Return the loss of a backward if each is noted; else sample it."""
        loss = args[0] if args else kwargs.get("tensors")
        try:
            if type(loss) is not Tensor or num_function_modes() or num_dispatch_modes():
                return unseen(self._loss_of, loss)
            return self._loss_of(loss)
        except Exception as error:
            failed(error)
            return None

    def _loss_of(self, loss: Any) -> Tensor | float | None:
        if not self.in_full:
            self._num_backwards += 1
            # Of several backwards of a step, losses of the last are comparable.
            if self._num_backwards % max(1, self._loop.between.usual_backwards) == 0:
                self.sample_loss(loss)
        elif isinstance(loss, Tensor) and loss.numel() == 1 and is_plain(loss):
            return loss.detach() if loss.is_cuda else loss.item()  # scripts add to a loss in place
        return None

    def sample_loss(self, loss: Any) -> None:
        if self.losses is not None and self.losses.is_due:
            self.wants_loss = self.in_full
            self.losses.take(loss)

    def around_data(self, original: Callable[..., Any], long_way: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of a DataLoader's `__next__`."""
        begins, ended = self.data_begins, self.data_ended

        def fetch(iterator: Any) -> Any:
            if is_traced():
                return original(iterator)
            try:
                is_usual = getattr(iterator, "_num_yielded", 0) and begins(False)
            except Exception as error:
                failed(error)
                is_usual = False
            if not is_usual:
                return long_way(iterator)
            try:
                return original(iterator)
            finally:
                if not ended():
                    _guarded(self._loop.data_ended)

        return fetch

    def loader_ended(self, _has_returned: bool) -> None:
        """End what `data_begins` began when a DataLoader started."""
        if not self.data_ended():
            self._loop.data_ended()

    def optimizer_hooks(self, long_begins: Hook, long_ended: Hook) -> tuple[Hook, Hook]:
        """Return the hooks before and after each step of an optimizer."""
        usual_begins, usual_ended = self.optimizer_begins, self.optimizer_ended

        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_traced():
                return
            try:
                is_usual = usual_begins(optimizer)
            except Exception as error:
                failed(error)
                return
            if not is_usual:
                long_begins(optimizer, args, kwargs)

        def ended(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_traced():
                return
            try:
                is_usual = usual_ended(optimizer)
            except Exception as error:
                failed(error)
                return
            if not is_usual:
                long_ended(optimizer, args, kwargs)

        return begins, ended

    def explicit_step(self) -> bool:
        is_busy = self.waits or self.fetches or self.steps or self.is_inside
        if is_busy or not self.is_on or not self.is_explicit or get_ident() != self.thread:
            return False
        self.end()
        return True

    def interpret(self) -> None:
        """Interpret all that was noted, at the end of a step."""
        _guarded(self._interpret_and_go_on)

    def _interpret_and_go_on(self) -> None:
        self._interpret()
        self.interpreted()

    def stop(self) -> None:
        """Tell the loop all that was noted. The open step goes on the long way."""
        num_in_a_row = self._num_in_a_row + self.num_noted
        self._rest = 0 if num_in_a_row >= LEAST_IN_A_ROW else min(MAX_REST, 2 * self._rest + 1)
        self._interpret()
        self._num_in_a_row = self._num_rested = 0
        optimizer = self.optimizer() if self.optimizer is not None else None
        if self.steps and not self.in_full and optimizer is not None:
            self._loop.usual_optimizer_begins(id(optimizer))
        self.forget()

    def forget(self) -> None:
        """Note nothing from here on."""
        self.is_on = self.is_inside = self.waits = self.fetches = self.steps = False
        self._take()
        self.inputs.clear()

    def _take(self) -> list[Event]:
        events, self.events = self.events, []
        self._num_in_a_row += self.num_noted
        self.num_noted = self.num_odd = self.first_of_step = 0
        self.root, self.is_odd = None, False
        return events

    def _interpret(self) -> None:
        self.is_on, self.is_interpreting = False, True
        num_noted, num_odd, first = self.num_noted, self.num_odd, self.first_of_step
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


def _guarded(function: Callable[[], None]) -> None:
    try:
        unseen(function)
    except Exception as error:
        failed(error)
