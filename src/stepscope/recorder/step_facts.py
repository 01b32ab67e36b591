"""What is known about the open step besides its times: its batch, its loss, its skipped updates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepscope.recorder.model import batch_size

GradientState = Callable[[nn.Module], tuple[Any, ...]]
MAX_INPUTS = 64  # compared with a new one; an episode can have thousands


class StepFacts:
    """What is known about the open step besides its times.

    A forward counts when a backward reaches it: samples that a GAN draws to look at do not. Calls that share a
    backward (an unrolled cell, two views of an image) are one micro-batch with the samples of the last. Their tokens
    add up, and so do single samples, the steps of an episode. Calls with the same input have one batch: a closure
    that an optimizer calls again.
    """

    def __init__(self) -> None:
        self.given_tokens: int | None = None
        self.loss: Any = None
        self.num_skipped = 0
        self._batches: dict[int, tuple[int, int, int]] = {}  # root -> tokens, samples, calls
        self._waiting: dict[int, tuple[int, int]] = {}  # root -> tokens, samples of a forward without a backward yet
        self._roots: dict[int, weakref.ref[nn.Module]] = {}  # those of `_waiting`
        self._gradients: dict[int, tuple[Any, ...]] = {}  # of the roots, before the backward
        self._inputs: list[tuple[weakref.ref[torch.Tensor], int]] = []  # of the calls so far, each with its root

    @property
    def batch(self) -> tuple[int, int, int]:
        """Tokens, samples and micro-batches of a step: what every trained model has seen at least.

        A GAN's discriminator sees each image as often as it is compared; its generator makes it once.
        """
        batches = self._batches or {root: (*sizes, 1) for root, sizes in self._waiting.items()}
        if len(batches) == 1:
            return next(iter(batches.values()))
        with_tokens = [batch for batch in batches.values() if batch[0]]
        return min(with_tokens or batches.values(), default=(0, 0, 0))

    def joined(self, following: StepFacts) -> StepFacts:
        """Return what is known about this step and the next one as a single step."""
        both = StepFacts()
        if self.given_tokens or following.given_tokens:
            both.given_tokens = (self.given_tokens or 0) + (following.given_tokens or 0)
        both.loss = self.loss if following.loss is None else following.loss
        both.num_skipped = self.num_skipped + following.num_skipped
        both._waiting = following._waiting
        for root in {**self._batches, **following._batches}:
            first, second = (each._batches.get(root, (0, 0, 0)) for each in (self, following))
            both._batches[root] = (first[0] + second[0], first[1] + second[1], first[2] + second[2])
        return both

    def count_batch(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Note the batch of a forward. Return its samples."""
        size = batch_size(args, kwargs)
        sizes = size.num_tokens or 0, size.num_samples or 0
        before = self._waiting.get(id(root))
        is_single = sizes[1] == 1
        if before is None or is_single or sizes[0]:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(given, torch.Tensor):
                if any(by == id(root) and _is_same(seen(), given) for seen, by in self._inputs[-MAX_INPUTS:]):
                    return size.num_samples
                self._inputs.append((weakref.ref(given), id(root)))
        if before is not None:
            sizes = before[0] + sizes[0], sizes[1] + (before[1] if is_single else 0)
        self._waiting[id(root)] = sizes
        self._roots[id(root)] = weakref.ref(root)
        return size.num_samples

    def backward_begins(self, gradients: GradientState) -> None:
        """Count the forward that waits for a backward; of several, remember the gradients of their models."""
        if len(self._waiting) > 1:
            self._gradients = {
                key: gradients(root) for key, one in self._roots.items() if (root := one()) is not None
            }
        else:
            self._count(list(self._waiting))

    def backward_ended(self, gradients: GradientState) -> None:
        """Count the forwards that the backward has reached: all that wait, if no gradient shows which."""
        if not self._gradients:
            return
        before, self._gradients = self._gradients, {}
        roots = {key: one() for key, one in self._roots.items() if key in before}
        reached = [key for key, root in roots.items() if root is not None and gradients(root) != before[key]]
        self._count(reached or list(self._waiting))

    def _count(self, keys: list[int]) -> None:
        for key in keys:
            new_tokens, new_samples = self._waiting.pop(key)
            del self._roots[key]
            tokens, samples, calls = self._batches.get(key, (0, 0, 0))
            self._batches[key] = tokens + new_tokens, samples + new_samples, calls + 1


class Gradients:
    """Looks at the gradients of a few parameters of a model, to see whether a backward has reached it."""

    def __init__(self) -> None:
        self._probes: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Parameter]]]
        self._probes = weakref.WeakKeyDictionary()

    def state(self, root: nn.Module) -> tuple[Any, ...]:
        """Return a value that changes when a backward adds to the model's gradients."""
        probes = self._probes.get(root)
        if probes is None:
            trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
            chosen = {0, len(trained) // 2, len(trained) - 1} if trained else ()
            probes = self._probes[root] = [weakref.ref(trained[i]) for i in chosen]
        gradients = [getattr(probe(), "grad", None) for probe in probes]
        return tuple(None if grad is None else (id(grad), grad._version) for grad in gradients)


def _is_same(seen: torch.Tensor | None, given: torch.Tensor) -> bool:
    """Return whether an input that is still alive has the same data: itself, or detached from its graph."""
    if seen is None or seen.shape != given.shape:
        return False
    try:
        return seen is given or (seen.data_ptr() == given.data_ptr() and seen.stride() == given.stride())
    except RuntimeError:
        return False  # a tensor without storage
