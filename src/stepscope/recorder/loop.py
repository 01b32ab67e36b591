"""The state of a training loop as the hooks report it: its current phase, its batch, and where each step ends."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stepscope.recorder.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, PHASES, Clock
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.model import batch_size
from stepscope.recorder.roots import Roots
from stepscope.recorder.steps import EXPLICIT, Boundary, StepFinder
from stepscope.recorder.steps import FORWARD as BY_FORWARD
from stepscope.recorder.steps import OPTIMIZER as BY_OPTIMIZER

OPTIMIZER_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


class StepFacts:
    """What is known about the open step besides its times."""

    def __init__(self) -> None:
        self.batches: dict[int, tuple[int, int, int]] = {}  # root -> tokens, samples, calls
        self.given_tokens: int | None = None
        self.loss: Any = None
        self.num_skipped = 0
        self.counted: set[int] = set()  # roots whose batch has been counted since the last backward

    @property
    def batch(self) -> tuple[int, int, int]:
        """Tokens, samples and micro-batches of the root with the most: a teacher repeats the student's tokens."""
        return max(self.batches.values(), default=(0, 0, 0))


class Loop:
    """Receives the hooks' events, switches the clock between phases, and calls `ended(boundary)` after each step.

    While `is_free` is set, only the ends of steps are processed.
    """

    def __init__(self, clock: Clock, ended: Callable[[Boundary], None]) -> None:
        self._clock = clock
        self._ended = ended
        self.roots = Roots(self.forward_begins, self.forward_ended)
        self._thread = threading.get_ident()
        self._listens_on: int | None = None  # the thread that runs the loop; None while not listening
        self.finder = StepFinder()
        self.facts = StepFacts()
        self.optimizers: dict[int, Any] = {}
        self.observer: Ledger | None = None
        self.is_free = False
        self.is_open = False
        self.is_plain = True
        """True while no optimizer step was nested in another or called by a loss scaler."""

        self._optimizer_stack: list[int] = []
        self._manual_depth = 0
        self._root_depth = 0
        self._backward_depth = 0
        self._deferred = Boundary.NONE
        self._data_depth = 0
        self._label_around_data: str | None = None
        self._backward_seen = False
        self._awaits_backward = False
        self._gradients_unused = False

    def listen(self) -> None:
        self._listens_on = self._thread

    def stop_listening(self) -> None:
        """Ignore all hooks from now on. The open step is not counted."""
        self._listens_on = None
        self.is_open = False

    def listens(self) -> bool:
        return threading.get_ident() == self._listens_on

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
        return OPTIMIZER if self._optimizer_stack else None

    def _end(self, boundary: Boundary) -> None:
        # An optimizer may step inside backward, from an autograd hook. No window may change there.
        if self._backward_depth:
            self._deferred = max(self._deferred, boundary, key=list(Boundary).index)
        else:
            self._ended(boundary)

    # --- data -----------------------------------------------------------------------------------

    def data_begins(self) -> None:
        self._open()
        self._data_depth += 1
        if self._data_depth == 1:
            self._label_around_data = self._clock.label
            self._switch(DATA)

    def data_ended(self) -> None:
        self._data_depth -= 1
        if self._data_depth == 0:
            self._switch(self._label_around_data)

    # --- forward --------------------------------------------------------------------------------

    def forward_begins(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.listens() or self._clock.label == BACKWARD:
            return  # another thread, or a checkpointed forward that backward runs again
        self._root_depth += 1
        if self._root_depth > 1 or self.is_free:
            return
        self._open()
        self._gradients_unused |= self._awaits_backward
        self._switch(FORWARD)
        # In training, a forward without gradients is an evaluation or a teacher and not part of the batch. Calls
        # that share a backward (an unrolled cell, two views of an image) are one micro-batch.
        is_training = torch.is_grad_enabled() or self.finder.source != BY_OPTIMIZER
        if is_training and id(root) not in self.facts.counted:
            self.facts.counted.add(id(root))
            size = batch_size(args, kwargs)
            tokens, samples, calls = self.facts.batches.get(id(root), (0, 0, 0))
            tokens, samples = tokens + (size.num_tokens or 0), samples + (size.num_samples or 0)
            self.facts.batches[id(root)] = (tokens, samples, calls + 1)
        if self.observer is not None:
            self.observer.note_inputs(args, kwargs)

    def forward_ended(self, root: nn.Module) -> None:
        if not self.listens() or self._root_depth == 0:
            return
        self._root_depth -= 1
        if self._root_depth:
            return
        # A forward that is followed by a backward lasts until the backward begins: it includes the loss.
        loss_follows = self._backward_seen and torch.is_grad_enabled()
        if not loss_follows and not self.is_free:
            self._switch(self._outer_label())
        # With gradients on, a forward ends a step only if an earlier forward was not followed by a backward.
        self._awaits_backward = torch.is_grad_enabled() and not self._gradients_unused
        if not self._awaits_backward:
            self._end(self.finder.saw(BY_FORWARD, id(root)))

    # --- backward -------------------------------------------------------------------------------

    def backward_begins(self, tensors: Any, create_graph: bool = False) -> None:
        self._open()
        self._switch(BACKWARD)
        self._backward_depth += 1
        if self._backward_depth > 1:
            return
        self.facts.counted.clear()
        self._backward_seen = True
        self._awaits_backward = False
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and not self._root_depth:
            self.facts.loss = _kept(tensors)
        if self.observer is not None:
            self.observer.backward_begins(create_graph, tensors)

    def backward_ended(self) -> None:
        self._backward_depth -= 1
        self._switch(self._outer_label())
        if not self._backward_depth and self._deferred is not Boundary.NONE:
            boundary, self._deferred = self._deferred, Boundary.NONE
            self._ended(boundary)

    # --- optimizer ------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any) -> None:
        if self._optimizer_stack and self._optimizer_stack[-1] >= 0:
            self.is_plain = False
        if id(optimizer) in self._optimizer_stack:
            # Either a subclass's step calls its parent's, or an exception that the script caught ended an earlier
            # step without notice. The stack frames show which.
            num_running = _num_running(optimizer)
            while self._optimizer_stack.count(id(optimizer)) >= num_running:
                del self._optimizer_stack[self._optimizer_stack.index(id(optimizer)) :]
        self._begin(optimizer, id(optimizer))

    def optimizer_surrounded(self, optimizer: Any) -> None:
        """Handle a step that is reported outside the optimizer's own range, before its hooks run."""
        self._begin(optimizer, -id(optimizer))

    def _begin(self, optimizer: Any, entry: int) -> None:
        self._optimizer_stack.append(entry)
        if self.is_free:
            return
        self._open()
        self.optimizers[id(optimizer)] = optimizer
        if len(self._optimizer_stack) == 1:
            self._switch(OPTIMIZER)
        if self.observer is not None:
            self.observer.note_gradients(optimizer)

    def optimizer_ended(self, optimizer: Any, skipped: bool) -> None:
        if skipped:
            self.facts.num_skipped += 1
        elif self._optimizer_stack:
            self._optimizer_stack.pop()
        if self._optimizer_stack:
            return  # an optimizer inside an optimizer: the outer one ends the step
        if not self.is_free:
            self._open()
            self._switch(self._outer_label())
        self._end(self.finder.saw(BY_OPTIMIZER, _owner(optimizer)))

    def optimizer_failed(self) -> None:
        """Handle an exception from an optimizer: no step was made."""
        self._optimizer_stack.clear()
        self._switch(self._outer_label())

    # --- calls from the script ------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore events and remove the module hooks inside this context."""
        if not self.listens():
            yield
            return
        self._listens_on = None
        self.roots.detach()
        try:
            yield
        finally:
            self.roots.attach()
            self._listens_on = self._thread

    def explicit_step(self, tokens: int | None = None, loss: Any = None) -> None:
        """End the step here, for `stepscope.step()`."""
        if not self.listens():
            return
        if not self.is_free:
            self._open()
            if tokens is not None:
                self.facts.given_tokens = (self.facts.given_tokens or 0) + int(tokens)
            if loss is not None:
                self.facts.loss = _kept(loss) if isinstance(loss, torch.Tensor) else float(loss)
        self._ended(self.finder.saw(EXPLICIT, EXPLICIT))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Label the time inside as `name`, for `stepscope.phase(name)`, regardless of the hooks."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}: use one of {', '.join(PHASES)}")
        if not self.listens() or self.is_free:
            yield
            return
        self._open()
        outer = self._clock.label
        self._clock.switch(name)
        self._manual_depth += 1
        try:
            yield
        finally:
            self._manual_depth -= 1
            self._switch(outer)


def _owner(optimizer: Any) -> int:
    """Return an id that stays the same when a script makes a new optimizer for the same parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return id(parameter)
    return id(optimizer)


def _num_running(optimizer: Any) -> int:
    """Return how many calls of this optimizer's hooked `step` are on the stack."""
    frame: types.FrameType | None = sys._getframe()
    num_running = 0
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name == "wrapper"
            and code.co_filename == OPTIMIZER_FILE
            and frame.f_locals.get("self") is optimizer
        ):
            num_running += 1
        frame = frame.f_back
    return num_running


def _kept(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that can be read later. The next run of a CUDA graph would overwrite its output."""
    has_graphs = loss.is_cuda and "torch._inductor.cudagraph_trees" in sys.modules
    if has_graphs and not torch.cuda.is_current_stream_capturing():  # add nothing to the script's own graph
        return loss.detach().clone()
    return loss.detach()
