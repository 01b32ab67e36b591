"""The state of a training loop as the hooks report it: its current phase, its batch, and where each step ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from stepscope.recorder.between_steps import Between
from stepscope.recorder.clock import (
    BACKWARD,
    DATA,
    FORWARD,
    FORWARD_IN_EVAL_MODE,
    LOADER_START,
    OPTIMIZER,
    PHASES,
    UNATTRIBUTED,
    Clock,
)  # fmt: skip
from stepscope.recorder.frames import num_running_steps
from stepscope.recorder.inputs import batch_size
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.modes import unseen
from stepscope.recorder.roots import Roots
from stepscope.recorder.step_ends import EXPLICIT, UPDATE, Boundary, Owners, StepFinder, first_parameter
from stepscope.recorder.step_ends import FORWARD as BY_FORWARD
from stepscope.recorder.step_ends import OPTIMIZER as BY_OPTIMIZER
from stepscope.recorder.step_facts import Forward, Gradients, StepFacts
from stepscope.recorder.updates import UpdateWatch
from stepscope.recorder.usual.steps import UsualSteps
from stepscope.recorder.values import is_plain
from stepscope.recorder.wall import surrounded


class Loop:
    """Receives the hooks' events, switches the clock between phases, and calls `ended(boundary)` after each step.

    While `is_free` is set, it labels only data and what lies between steps.
    """

    def __init__(self, clock: Clock, ended: Callable[[Boundary], None]) -> None:
        self._clock, self._ended = clock, ended
        self.usual = UsualSteps(self, clock)
        self.roots = Roots(self.forward_begins, self.forward_ended, self.usual)
        self._is_listening = self._is_paused = False
        self._thread: int | None = None  # the thread that trains, or the first that calls a model
        self.finder = StepFinder()
        self.facts = StepFacts()
        self.optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._last_optimizer: Any = None  # a weak reference to the one that ended a step
        self._owners = Owners()
        self.observer: Ledger | None = None
        self.is_free = self.is_open = False
        self.num_prefetched = 0  # batches that the workers of a DataLoader may have ready
        self.between = Between(self.optimizers)
        self._updates = UpdateWatch()
        self._gradients = Gradients()
        self._optimizer_stack: list[int] = []
        self._manual_depth = self._root_depth = self._backward_depth = self._data_depth = 0
        self._deferred = Boundary.NONE
        self._label_around_data: str | None = None
        self._backward_seen = self._awaits_backward = self._gradients_unused = False
        self._has_backward = False  # since the last step of an optimizer
        self._asides: list[tuple[str, str | None]] = []  # what is going on beside training, and the label around it
        self._called_in_eval_mode = self._trains_in_eval_mode = False

    def listen(self) -> None:
        self._is_listening = True

    def stop_listening(self) -> None:
        """Ignore all hooks from now on. The open step is not counted."""
        self._is_listening = False
        self.is_open = False
        self.usual.forget()

    def listens(self, trains: bool = False) -> bool:
        """Return whether to take an event of this thread. The first thread that `trains` is the loop's."""
        if not self._is_listening or self._is_paused:
            return False
        thread = threading.get_ident()
        if thread == self._thread:
            if self.usual.is_on:
                self.usual.stop()
            return True
        if self._thread is None or (trains and not self.finder.trains):
            self._thread = thread
            self._root_depth = self._data_depth = self._backward_depth = 0
            return True
        return False

    def _open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._clock.begin_step()

    def _switch(self, label: str | None) -> None:
        if not self._manual_depth:  # inside stepscope.phase(), the user's label wins
            self._clock.switch(label)

    def _outer_label(self) -> str | None:
        """Return the phase that encloses the one that has just ended."""
        if self._backward_depth:
            return BACKWARD  # a reentrant checkpoint
        if self._root_depth:
            return FORWARD  # a gradient taken inside the forward
        if self._optimizer_stack:
            return OPTIMIZER
        return self._asides[-1][0] if self._asides else None

    def _end(self, boundary: Boundary) -> None:
        # An optimizer may step inside backward, from an autograd hook. No window may change there.
        if self._backward_depth:
            self._deferred = max(self._deferred, boundary, key=list(Boundary).index)
        else:
            self._ended(boundary)

    def look_for_update(self) -> None:
        """End the step here if the parameters have changed since the last backward."""
        if self._updates.is_pending and not self._backward_depth and self._updates.changed():
            self._updated()

    def end_last_step(self) -> None:
        """End the step of an update that no later event can show."""
        self.look_for_update()
        if self._updates.is_pending and self._updates.replaces:
            self._updated()

    def _updated(self) -> None:
        self._clock.switch(None)
        self._ended(self.finder.saw(UPDATE, UPDATE))

    # --- what lies between training steps ---------------------------------------------------------

    def aside_begins(self, label: str) -> bool:
        """Label the time from here: a checkpoint, a line for a log. Return whether `aside_ended` is to be called."""
        if not self.listens() or not self.is_open or self._manual_depth or self._asides or self._clock.label == label:
            return False
        self.between.note_place(label)
        self._asides.append((label, self._clock.label))
        self._clock.switch(label)
        return True

    def aside_ended(self, _has_returned: bool = True) -> None:
        self._clock.switch(self._asides.pop()[1])

    # --- data -----------------------------------------------------------------------------------

    def data_begins(self, starts: bool = False) -> None:
        self.look_for_update()
        self._open()
        self._data_depth += 1
        if self._data_depth == 1:
            self._label_around_data = self._clock.label
            self._switch(LOADER_START if starts else DATA)

    def data_ended(self, _has_returned: bool = True) -> None:
        self._data_depth -= 1
        if self._data_depth == 0:
            self._switch(self._label_around_data)

    # --- forward --------------------------------------------------------------------------------

    def forward_begins(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.listens() or self._backward_depth or self._clock.label == BACKWARD:
            return  # another thread, or a checkpointed forward that backward runs again
        self._root_depth += 1
        if self._root_depth > 1:
            return
        self.look_for_update()
        self._open()
        has_gradients = torch.is_grad_enabled()
        if self._asides and not has_gradients:
            label = self._asides[-1][0]
        elif self.finder.trains and not has_gradients:
            label = self.between.label_without_gradients(root, lambda: batch_size(args, kwargs).num_samples)
        else:
            label = self._label_with_gradients(root)
            if not self.finder.trains:
                self.between.called_before_training(root)
        self._switch(label)
        self.facts.called_as(label)
        # In training, a forward without gradients is an evaluation or a teacher and not part of the batch.
        if has_gradients or not self.finder.trains:
            self._gradients_unused |= self._awaits_backward
            self.between.trained_with(self.facts.count_batch(root, args, kwargs))
        if self.observer is not None:
            self.observer.note_inputs(args, kwargs)

    def _label_with_gradients(self, root: nn.Module) -> str:
        self._called_in_eval_mode = not self._trains_in_eval_mode and self.between.looks_on(root)
        if not self._called_in_eval_mode or not self.finder.trains:
            return UNATTRIBUTED if self.is_free else FORWARD
        return FORWARD_IN_EVAL_MODE

    def forward_ended(self, root: nn.Module) -> None:
        if not self.listens() or self._root_depth == 0 or self._backward_depth:
            return
        self._root_depth -= 1
        if self._root_depth:
            return
        # A forward that is followed by a backward lasts until the backward begins: it includes the loss.
        is_training = self._clock.label in (FORWARD, UNATTRIBUTED)
        if not (self._backward_seen and is_training and torch.is_grad_enabled()):
            self._switch(self._outer_label())
        if self.finder.trains:
            return
        # With gradients on, a forward ends a step only if an earlier forward was not followed by a backward.
        self._awaits_backward = torch.is_grad_enabled() and not self._gradients_unused
        if not self._awaits_backward:
            self._end(self.finder.saw(BY_FORWARD, id(root)))

    # --- backward -------------------------------------------------------------------------------

    def backward_begins(self, tensors: Any, inputs: Any = None, create_graph: bool = False) -> None:
        if not self._backward_depth:
            self.look_for_update()
            if self.watches_updates and self._updates.backward_begins(tensors, inputs):
                self._updated()
        self._open()
        if self._clock.label != UNATTRIBUTED:
            self._switch(BACKWARD)
        self._backward_depth += 1
        if self._backward_depth > 1:
            return
        self.finder.trains = True
        is_last = self.between.backward_begins()
        self.facts.backward_begins(self._gradients.state)
        self._backward_seen = self._has_backward = True
        self._awaits_backward = False
        self._trains_in_eval_mode |= self._called_in_eval_mode
        if self.is_free:
            if is_last:
                self.usual.sample_loss(tensors)
            return
        is_loss = isinstance(tensors, torch.Tensor) and is_plain(tensors) and tensors.numel() == 1
        if not self._root_depth:
            self.facts.note_loss(tensors if is_loss or isinstance(tensors, float) else None)
        if self.observer is not None:
            self.observer.backward_begins(create_graph, tensors)

    def backward_ended(self, _has_returned: bool = True) -> None:
        self._backward_depth -= 1
        if self._clock.label != UNATTRIBUTED:
            self._switch(self._outer_label())
        if self._backward_depth:
            return
        self.facts.backward_ended(self._gradients.state)
        if self.watches_updates:
            self._updates.backward_ended()
        if self._deferred is not Boundary.NONE:
            boundary, self._deferred = self._deferred, Boundary.NONE
            self._ended(boundary)

    @property
    def watches_updates(self) -> bool:
        """Whether parameters that change after a backward end a step: no optimizer and no step() was seen."""
        return self.finder.source not in (BY_OPTIMIZER, EXPLICIT)

    # --- optimizer ------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any) -> None:
        if id(optimizer) in self._optimizer_stack:
            # Either a subclass's step calls its parent's, or an exception that the script caught ended an earlier
            # step without notice. The stack frames show which.
            num_running = num_running_steps(optimizer)
            while self._optimizer_stack.count(id(optimizer)) >= num_running:
                del self._optimizer_stack[self._optimizer_stack.index(id(optimizer)) :]
        self._begin(optimizer, id(optimizer))

    def optimizer_surrounded(self, optimizer: Any) -> None:
        """Handle a step that is reported outside the optimizer's own range, before its hooks run."""
        self._begin(optimizer, -id(optimizer))

    def _begin(self, optimizer: Any, entry: int) -> None:
        self._optimizer_stack.append(entry)
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self.between.another_optimizer()
        if self.is_free:
            return
        self._open()
        if len(self._optimizer_stack) == 1:
            self._switch(OPTIMIZER)
        self._updates.forget()
        if self.observer is not None:
            self.observer.note_gradients(optimizer)

    def optimizer_ended(self, optimizer: Any, skipped: bool = False) -> None:
        if skipped:
            self.facts.num_skipped += 1
        elif self._optimizer_stack:
            self._optimizer_stack.pop()
        if self._optimizer_stack:
            return  # an optimizer inside an optimizer: the outer one ends the step
        self._open()
        self.between.training_goes_on()
        self._switch(self._outer_label())
        boundary = self.finder.saw(BY_OPTIMIZER, self._owners.number(optimizer), self._has_backward)
        self._has_backward = False
        if boundary is not Boundary.NONE:
            self._last_optimizer = weakref.ref(optimizer)
        self._end(boundary)

    def optimizer_made(self, optimizer: Any) -> None:
        """Look for the model, if it is one that is trained after another."""
        first = first_parameter(optimizer)
        if first is not optimizer and self.finder.source == BY_OPTIMIZER and self.listens():
            self.roots.await_call_with(first)

    def optimizer_failed(self) -> None:
        """Handle an exception from an optimizer: no step was made."""
        self._optimizer_stack.clear()
        self._switch(self._outer_label())

    # --- usual steps ----------------------------------------------------------------------------

    def start_usual(self, in_full: bool, most_steps: int) -> None:
        """Note the events of the next step instead of interpreting them, if it can be a usual one."""
        depths = (self._root_depth, self._backward_depth, self._data_depth, self._manual_depth)
        optimizer = self._last_optimizer() if self._last_optimizer is not None else None
        is_busy = any(depths) or self._asides or self._optimizer_stack or self._updates.is_pending
        is_usual = self._is_listening and self._backward_seen and self.finder.is_usual and not self.facts.by_loader
        if is_usual and optimizer is not None and not is_busy:
            owner = EXPLICIT if self.finder.source == EXPLICIT else self._owners.number(optimizer)
            self.usual.start(self._thread, optimizer, owner, in_full, most_steps)

    def usual_forward(self, forward: Forward, goes_on: bool) -> None:
        self._root_depth += goes_on
        self._called_in_eval_mode = False
        self._switch(UNATTRIBUTED if self.is_free else FORWARD)
        self.between.trained_with(forward[2].num_samples)
        self.facts.count_usual(forward)

    def usual_optimizer_begins(self, optimizer: int) -> None:
        self._optimizer_stack.append(optimizer)
        if not self.is_free:
            self._switch(OPTIMIZER)

    def usual_optimizer_ended(self) -> None:
        self._optimizer_stack.clear()
        self._has_backward = False
        self.between.training_goes_on()
        self._switch(None)

    def usual_step_ended(self, owner: Any) -> None:
        self.usual_optimizer_ended()
        self._end(self.finder.saw(EXPLICIT if owner == EXPLICIT else BY_OPTIMIZER, owner))

    # --- calls from the script ------------------------------------------------------------------

    def pause(self) -> Callable[[bool], None] | None:
        """Ignore events and remove the module hooks until the returned function is called."""
        if not self.listens():
            return None
        self._is_paused = True
        self.roots.detach()

        def resume(_has_returned: bool) -> None:
            self._is_paused = False
            if self._is_listening:
                self.roots.attach()

        return resume

    def explicit_step(self, tokens: int | None = None, loss: Any = None) -> None:
        """End the step here, for `stepscope.step()`."""
        if not self.listens():
            return
        self._open()
        self.facts.give(tokens, None if self.is_free else loss)
        if self.is_free:
            self._switch(None)
        self._ended(self.finder.saw(EXPLICIT, EXPLICIT))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Label the time inside as `name`, for `stepscope.phase(name)`, regardless of the hooks."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}: use one of {', '.join(PHASES)}")
        return surrounded(partial(unseen, self._begin_phase, name))

    def _begin_phase(self, name: str) -> Callable[[], None] | None:
        if not self.listens() or self.is_free:
            return None
        self._open()
        outer = self._clock.label
        self._clock.switch(name)
        self._manual_depth += 1

        def end() -> None:
            self._manual_depth -= 1
            self._switch(outer)

        return partial(unseen, end)
