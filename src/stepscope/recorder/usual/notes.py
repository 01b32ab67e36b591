"""What the hooks note in a usual step (`steps.py`): in C where that could be built, else in Python.

Both do the same, and the tests run with each. Without a C compiler, Stepscope installs without the C part.
"""

from collections.abc import Callable
from sys import getrefcount
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled, nn

from stepscope.recorder.inputs import BatchSize, Inputs, batch_size, is_known
from stepscope.recorder.modes import num_function_modes, unseen, without_subclasses
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
)  # fmt: skip
from stepscope.recorder.wall import failed

LONG_WAY = object()
"""What `forward` returns if it has called nothing."""
_INTERFACE = 1  # the same as in _notes.c


class PythonLink:
    """What a call of a root module needs."""

    __slots__ = ("call", "key", "most_references", "most_with_keywords", "root")

    root: Callable[[], nn.Module | None]
    """A weak reference."""
    key: int
    """The root's id."""
    call: Callable[..., Any] | None
    """In place of its `_call_impl`."""
    most_references: int
    """How many `forward` sees unless the script has copied the link, without and with keyword arguments."""
    most_with_keywords: int

    def ended_unusually(self) -> None:
        """Called after a call that began as a usual one."""
        raise NotImplementedError


class PythonNotes:
    """Notes the events of usual steps while `is_on`. The methods for what begins return whether it is usual."""

    __slots__ = (
        *("due_ns", "events", "fetches", "first_of_step", "in_full", "inputs", "is_explicit", "is_inside", "is_odd"),
        *("is_on", "most_steps", "num_noted", "num_odd", "optimizer", "root", "shapes", "size", "steps", "thread"),
        *("waits", "wants_loss"),
    )

    def __init__(self) -> None:
        self.is_on = False
        self.is_inside = False
        """Whether a forward or a backward runs: all that is called there is part of it."""
        self.in_full = False
        """Whether each phase is noted with its loss, and every step replayed."""
        self.is_explicit = False
        """Whether `stepscope.step()` ends the steps."""
        self.is_odd = False
        """Whether the open step has to be replayed."""
        self.waits = self.fetches = self.steps = False  # for a backward, for data, inside the optimizer
        self.wants_loss = False
        """Whether to call `loss_of` at the next backward."""
        self.thread = 0
        self.due_ns = 0
        """When to interpret what was noted, or after how many steps."""
        self.most_steps = 0
        self.num_noted = self.num_odd = 0  # steps
        self.first_of_step = 0  # event of the open step
        self.events: list[Event] = []
        self.inputs: Inputs = []  # of the open step
        self.optimizer: Callable[[], Any] | None = None  # a weak reference
        self.root: int | None = None  # the model of the open step
        # The inputs of the last forward, and their size: comparing them takes less than looking it up.
        self.shapes: list[Any] | None = None
        self.size = BatchSize(None, None)

    def loss_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what to note of the arguments of a backward."""
        raise NotImplementedError

    def interpret(self) -> None:
        """Called at the end of a step when it is time to."""
        raise NotImplementedError

    def forward(self, link: PythonLink, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a root module, and note it. Return LONG_WAY if that is not part of a usual step."""
        if not self.is_on or not (self.is_inside or (not self.waits and self._is_ours())):
            return LONG_WAY
        root = link.root()
        most = link.most_with_keywords if kwargs else link.most_references
        if getrefcount(link) > most or root is None:
            return LONG_WAY
        call = link.call or root._call_impl
        if self.is_inside:
            return call(*args, **kwargs)
        try:
            if not self._forward_begins(link, root, args, kwargs):
                return LONG_WAY
        except Exception as error:
            failed(error)
            return LONG_WAY
        try:
            return call(*args, **kwargs)
        finally:
            self.is_inside = False
            if not self.is_on:  # something unusual has happened inside
                link.ended_unusually()  # type: ignore[unreachable]  # the call changes it

    @staticmethod
    def num_references(link: PythonLink, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return how many references a link has that `forward` was given."""
        return getrefcount(link)

    def _forward_begins(
        self, link: PythonLink, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if not root.training or not is_grad_enabled():
            return False
        if num_function_modes():
            return below_modes(self._note_unseen, link, args, kwargs)
        return self._note_unseen(link, args, kwargs)

    def _note_unseen(self, link: PythonLink, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        now = perf_counter_ns()
        self.is_inside = self.waits = True
        key, seen, was_seen = link.key, None, False
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, Tensor):
            seen, was_seen = ref(given), was_given(given, key, self.inputs)
            self.inputs.append((seen, key))
        if self.root is None:
            self.root = key
        elif self.root != key:
            self.is_odd = True
        shapes: list[Any] = [*kwargs]
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) is Tensor and not value.is_nested:
                shapes += value.shape, value.dtype
            else:
                shapes.append(value if value is None or type(value) is int else object())  # like no other
        if shapes != self.shapes:
            self.shapes, self.size = shapes, batch_size(args, kwargs)
        self.events.append((FORWARD, now, (key, link.root, self.size, seen, was_seen)))
        return True

    def backward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self.waits or self.is_inside or not self._is_ours():
            return False
        self.is_inside, self.waits = True, False
        loss = self.loss_of(args, kwargs) if self.wants_loss else None
        self.events.append((BACKWARD, perf_counter_ns(), loss))
        return True

    def backward_ended(self) -> bool:
        """Return whether it was noted: something unusual may have happened inside."""
        self.is_inside = False
        if self.is_on and self.in_full:
            self.events.append((BACKWARD_ENDED, perf_counter_ns(), None))
        return self.is_on

    def data_begins(self, starts: bool) -> bool:
        if self.is_inside or self.fetches or self.steps or not self._is_ours():
            return False
        self.fetches = True
        self.is_odd |= starts
        self.events.append((DATA, perf_counter_ns(), starts))
        return True

    def data_ended(self) -> bool:
        """Return whether it was noted."""
        self.fetches = False
        if self.is_on:
            self.events.append((DATA_ENDED, perf_counter_ns(), None))
        return self.is_on

    def optimizer_begins(self, optimizer: Any) -> bool:
        if self.steps or not self._is_usual_one(optimizer):
            return False
        self.steps = True
        if self.in_full:
            self.events.append((OPTIMIZER, perf_counter_ns(), id(optimizer)))
        return True

    def optimizer_ended(self, optimizer: Any) -> bool:
        if not self.steps or not self._is_usual_one(optimizer):
            return False
        self.steps = False
        if not self.is_explicit:
            self.end()
        elif self.in_full:
            self.events.append((OPTIMIZER_ENDED, perf_counter_ns(), None))
        return True

    def end(self) -> None:
        """End the step."""
        now, is_odd = perf_counter_ns(), self.is_odd or self.waits
        self.events.append((END, now, is_odd))
        self.waits = self.is_odd = False
        self.root = None
        self.inputs.clear()
        self.num_noted += 1
        self.num_odd += is_odd
        self.first_of_step = len(self.events)
        if now >= self.due_ns or self.num_noted >= self.most_steps:
            self.interpret()

    def _is_ours(self) -> bool:
        return self.is_on and get_ident() == self.thread

    def _is_usual_one(self, optimizer: Any) -> bool:
        is_it = self.optimizer is not None and optimizer is self.optimizer()
        return is_it and not self.is_inside and self._is_ours()


def below_modes(noted: Callable[..., bool], *given: Any) -> bool:
    return not torch.compiler._is_compiling_flag and unseen(noted, *given)  # else an export traces this


def was_given(given: Tensor, key: int, inputs: Inputs) -> bool:
    """Return whether a root was called with this data before in the step."""
    if not inputs:
        return False
    with without_subclasses():
        return is_known(given, key, inputs)


try:
    from stepscope.recorder.usual import _notes  # type: ignore[attr-defined]  # optional

    if _notes.INTERFACE != _INTERFACE:  # of another version of Stepscope
        _notes = None
except ImportError:  # not built here, or built for another system
    _notes = None


def use_compiled() -> None:
    """Give the C part what it calls, in the order of _notes.c."""
    modes = is_grad_enabled, num_function_modes, below_modes
    _notes.use(perf_counter_ns, *modes, Tensor, was_given, batch_size, failed, LONG_WAY)


if TYPE_CHECKING:
    Notes: TypeAlias = PythonNotes
    Link: TypeAlias = PythonLink
elif _notes is None:
    Notes, Link = PythonNotes, PythonLink
else:
    use_compiled()
    Notes, Link = _notes.Notes, _notes.Link
