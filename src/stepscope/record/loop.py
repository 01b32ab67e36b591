"""A training loop as the hooks show it: which phase it is in, what its step is made of, where the step ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from stepscope.record.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, PHASES, Clock
from stepscope.record.model import batch_size
from stepscope.record.steps import EXPLICIT, Boundary, StepFinder
from stepscope.record.steps import FORWARD as BY_FORWARD
from stepscope.record.steps import OPTIMIZER as BY_OPTIMIZER


class TensorObserver(Protocol):
    """What wants to know whose tensors are whose while a step runs."""

    def note_inputs(self, args: Any, kwargs: Any) -> None: ...
    def backward_begins(self, create_graph: bool) -> None: ...
    def note_gradients(self, optimizer: Any) -> None: ...


class StepFacts:
    """What is known of the step that is open, beside its times."""

    def __init__(self) -> None:
        self.batches: dict[int, tuple[int, int, int]] = {}  # root -> tokens, samples, calls
        self.given_tokens: int | None = None
        self.loss: Any = None
        self.num_skipped = 0

    @property
    def batch(self) -> tuple[int, int, int]:
        """Tokens, samples and micro-batches of the busiest root: a teacher sees the student's tokens again."""
        return max(self.batches.values(), default=(0, 0, 0))


class Loop:
    """Hears the hooks; cuts the clock; says `ended(boundary)` when a step is over.

    While `is_free` only the ends of steps are heard, at the cost of next to nothing.
    """

    def __init__(self, clock: Clock, ended: Callable[[Boundary], None], profiler_began: Callable[[], None]) -> None:
        self._clock = clock
        self._ended = ended
        self._profiler_began = profiler_began
        self._thread = threading.get_ident()
        self._listens_on: int | None = None  # the thread whose loop this is; None while nobody listens
        self.finder = StepFinder()
        self.facts = StepFacts()
        self.optimizers: dict[int, Any] = {}
        self.observer: TensorObserver | None = None
        self.is_free = False
        self.is_open = False

        self._optimizer_depth = 0
        self._manual_depth = 0
        self._root_depth = 0
        self._data_depth = 0
        self._label_around_data: str | None = None
        self._backward_seen = False
        self._awaits_backward = False
        self._gradients_unused = False

    def listen(self) -> None:
        self._listens_on = self._thread

    def stop_listening(self) -> None:
        """From now on every hook passes by; the step that is open is not counted."""
        self._listens_on = None
        self.is_open = False

    def listens(self) -> bool:
        return threading.get_ident() == self._listens_on

    def _open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._clock.begin_step()

    def _switch(self, label: str | None) -> None:
        if not self._manual_depth:  # inside stepscope.phase() the user's word counts
            self._clock.switch(label)

    def _outer_label(self) -> str | None:
        return OPTIMIZER if self._optimizer_depth else None

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
        size = batch_size(args, kwargs)
        tokens, samples, calls = self.facts.batches.get(id(root), (0, 0, 0))
        self.facts.batches[id(root)] = (
            tokens + (size.num_tokens or 0),
            samples + (size.num_samples or 0),
            calls + 1,
        )
        if self.observer is not None:
            self.observer.note_inputs(args, kwargs)

    def forward_ended(self, root: nn.Module) -> None:
        if not self.listens() or self._root_depth == 0:
            return
        self._root_depth -= 1
        if self._root_depth:
            return
        # A forward that a backward will follow lasts until that begins: the loss is part of it.
        loss_follows = self._backward_seen and torch.is_grad_enabled()
        if not loss_follows and not self.is_free:
            self._switch(self._outer_label())
        # With gradients on, a forward only ends a step once one was seen that no backward followed.
        self._awaits_backward = torch.is_grad_enabled() and not self._gradients_unused
        if not self._awaits_backward:
            self._ended(self.finder.saw(BY_FORWARD, id(root)))

    # --- backward -------------------------------------------------------------------------------

    def backward_begins(self, tensors: Any, create_graph: bool = False) -> None:
        self._open()
        self._backward_seen = True
        self._awaits_backward = False
        self._switch(BACKWARD)
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self.facts.loss = tensors.detach()
        if self.observer is not None:
            self.observer.backward_begins(create_graph)

    def backward_ended(self) -> None:
        self._switch(self._outer_label())

    # --- optimizer ------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any) -> None:
        self._optimizer_depth += 1
        if self.is_free:
            return
        self._open()
        self.optimizers[id(optimizer)] = optimizer
        if self._optimizer_depth == 1:
            self._switch(OPTIMIZER)
        if self.observer is not None:
            self.observer.note_gradients(optimizer)

    def optimizer_ended(self, optimizer: Any, skipped: bool) -> None:
        if skipped:
            self.facts.num_skipped += 1
        else:
            self._optimizer_depth = max(0, self._optimizer_depth - 1)
        if self._optimizer_depth:
            return  # an optimizer inside an optimizer: the outer one ends the step
        if not self.is_free:
            self._open()
            self._switch(None)
        self._ended(self.finder.saw(BY_OPTIMIZER, id(optimizer)))

    # --- what the script says itself ------------------------------------------------------------

    def profiler_begins(self) -> None:
        self._profiler_began()

    def explicit_step(self, tokens: int | None, loss: Any) -> None:
        """`stepscope.step()`: the step ends here."""
        if not self.listens():
            return
        if not self.is_free:
            self._open()
            if tokens is not None:
                self.facts.given_tokens = (self.facts.given_tokens or 0) + int(tokens)
            if loss is not None:
                self.facts.loss = loss.detach() if isinstance(loss, torch.Tensor) else float(loss)
        self._ended(self.finder.saw(EXPLICIT, EXPLICIT))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`stepscope.phase(name)`: the time inside belongs to `name`, whatever the hooks say."""
        if name not in PHASES:
            raise ValueError(f"there is no phase {name!r}: the phases are {', '.join(PHASES)}")
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
