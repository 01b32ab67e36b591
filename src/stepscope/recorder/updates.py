"""Sees parameters change after a backward: the end of a step in loops that use no torch optimizer.

A loop may update its parameters by hand (`p.data.add_(p.grad, alpha=-lr)`), with a class of its own, or with another
library's engine. All of them change the leaves of the graph that backward ran through, so those are compared: their
version counters and addresses, and a few values for changes through `.data`, which no counter shows.
"""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.recorder.modes import has_dispatch_modes
from stepscope.recorder.values import is_capturing

MAX_NODES = 200_000
MAX_WATCHED = 64
MAX_VALUES = 1024
NUM_PROBED = 3
# Comparing values on a GPU waits for it. After so many updates, gradients that were reset show one instead.
NUM_COMPARED_ON_GPU = 3


class UpdateWatch:
    """Remembers the parameters as a backward left them; `changed()` tells whether they are different now."""

    def __init__(self) -> None:
        self.is_pending = False
        """Whether a backward has run and no update has been seen since."""
        self.replaces = False
        """Whether updates make new parameters, which only the next backward shows."""
        self._watched: list[weakref.ref[torch.Tensor]] = []
        self._probed: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._state: list[tuple[int, int]] = []
        self._gradients: list[tuple[int, int]] = []
        self._counters_show = False
        self._num_by_value = 0

    def backward_begins(self, tensors: Any, inputs: Any = None) -> bool:
        """Find the parameters, from the graph or from the `inputs` of torch.autograd.grad.

        Return whether they replace those of the last backward: an update that changes nothing in place.
        """
        known = [one() for one in self._watched]
        if inputs is None and known and all(leaf is not None for leaf in known):
            return False
        leaves = _parameters(_leaves(tensors, inputs))
        known_ids = {id(leaf) for leaf in known if leaf is not None}
        is_replaced = self.is_pending and bool(leaves) and not any(id(leaf) in known_ids for leaf in leaves)
        self._watched = [weakref.ref(leaf) for leaf in leaves]
        self.replaces |= is_replaced
        self.is_pending &= not is_replaced
        return is_replaced

    def backward_ended(self) -> None:
        """Remember the parameters as they are now."""
        self.is_pending = bool(self._watched) and not is_capturing()
        if not self.is_pending:
            return
        self._state, self._gradients = self._counters(), self._gradient_counters()
        self._probed = []
        # Below a dispatch mode, which the memory window is, torch._foreach_add_ changes no counter.
        if (not self._counters_show or has_dispatch_modes()) and not self._relies_on_gradients():
            # Not subclasses: comparing sharded tensors would communicate.
            plain = (torch.Tensor, nn.Parameter)
            alive = [leaf for one in self._watched if type(leaf := one()) in plain and _has_values(leaf)]
            with torch.no_grad(), _disable_current_modes():
                for leaf in sorted(alive, key=torch.Tensor.numel)[:NUM_PROBED]:
                    self._probed.append((weakref.ref(leaf), _values(leaf).clone()))

    def forget(self) -> None:
        """An optimizer steps: nothing is pending, and nothing is kept."""
        self.is_pending = False
        self._probed = []

    def changed(self) -> bool:
        """Return whether the parameters have changed since the last backward; if so, nothing is pending any more."""
        if not self.is_pending:
            return False
        if self._counters() != self._state:
            self._counters_show = True
        elif self._relies_on_gradients():
            if self._gradient_counters() == self._gradients:
                return False
        elif self._values_differ():
            self._num_by_value += 1
        else:
            return False
        self.is_pending = False
        self._probed = []
        return True

    def _values_differ(self) -> bool:
        if not self._probed:
            return False
        with torch.no_grad(), _disable_current_modes():
            known = ((one(), old) for one, old in self._probed)
            return any(_has_values(leaf) and not torch.equal(_values(leaf), old) for leaf, old in known)

    def _relies_on_gradients(self) -> bool:
        first = next((one() for one in self._watched), None)
        return self._num_by_value >= NUM_COMPARED_ON_GPU and first is not None and first.is_cuda

    def _counters(self) -> list[tuple[int, int]]:
        alive = (one() for one in self._watched)
        return [(-1, -1) if leaf is None else (leaf._version, _address(leaf)) for leaf in alive]

    def _gradient_counters(self) -> list[tuple[int, int]]:
        gradients = (getattr(one(), "grad", None) for one in self._watched)
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in gradients]


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0  # a tensor without storage, such as a sharded one


def _has_values(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor is alive with its memory: FSDP frees what it has gathered."""
    if tensor is None:
        return False
    end = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride())) + 1
    try:
        return not tensor.numel() or end * tensor.element_size() <= tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return True  # a wrapper without its own memory, as torch.func makes them


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sample of a tensor's values."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    return flat[:: max(1, flat.numel() // MAX_VALUES)][:MAX_VALUES]


def _parameters(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return at most MAX_WATCHED leaves, spread over all; inputs that want a gradient only if nothing else does."""
    found = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)] or leaves
    return found[:: max(1, len(found) // MAX_WATCHED)][:MAX_WATCHED]


def _leaves(tensors: Any, inputs: Any) -> list[torch.Tensor]:
    if inputs is not None:
        return [one for one in _as_list(inputs) if isinstance(one, torch.Tensor) and one.is_leaf]
    todo = [one.grad_fn for one in _as_list(tensors) if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    seen: set[Any] = set()
    leaves: dict[int, torch.Tensor] = {}
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        todo.extend(function for function, _ in node.next_functions if function is not None)
    return list(leaves.values())


def _as_list(values: Any) -> list[Any]:
    if isinstance(values, torch.Tensor):
        return [values]
    return list(islice(values, MAX_NODES)) if isinstance(values, (list, tuple)) else []
