"""What is known about the open step besides its times: its batch, its loss, its skipped updates."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import nn

from stepscope.recorder.clock import TimedStep
from stepscope.recorder.inputs import BatchSize, Inputs, batch_size, is_known
from stepscope.recorder.values import parameters_in

GradientState = Callable[[nn.Module], tuple[Any, ...]]


# A forward of a usual step: its root (id and reference), its batch, its first input, whether that was seen before.
Forward = tuple[int, weakref.ref[nn.Module], BatchSize, "weakref.ref[torch.Tensor] | None", bool]


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
        # Samples that DataLoaders gave, and most at once, as far as known: not in usual steps, which have one model.
        self._fetched = self._most_at_once = 0
        self._batches: dict[int, tuple[int, int, int]] = {}  # root -> tokens, samples, calls
        # root -> tokens, samples of a forward without a backward yet, and the root itself
        self._waiting: dict[int, tuple[int, int, weakref.ref[nn.Module]]] = {}
        self._gradients: dict[int, tuple[Any, ...]] = {}  # of the roots, before the backward
        self._inputs: Inputs = []

    def give(self, tokens: int | None = None, loss: Any = None) -> None:
        """Note what the script said about its step."""
        if tokens is not None:
            self.given_tokens = (self.given_tokens or 0) + int(tokens)
        if loss is not None:
            self.loss = _kept(loss) if isinstance(loss, torch.Tensor) else float(loss)

    @property
    def batch(self) -> tuple[int, int, int]:
        """Tokens, samples and micro-batches of a step: what every trained model has seen at least.

        A GAN's discriminator sees each image as often as it is compared; its generator makes it once. If that makes
        more, for a second loss, or less, while its critic learns, the samples are those that the loop has fetched.
        """
        batches = self._batches or {key: (tokens, samples, 1) for key, (tokens, samples, _) in self._waiting.items()}
        if len(batches) == 1:
            return next(iter(batches.values()))
        with_tokens = [batch for batch in batches.values() if batch[0]]
        tokens, samples, calls = min(with_tokens or batches.values(), default=(0, 0, 0))
        most = max((batch[1] for batch in batches.values()), default=0)
        is_all = self._fetched - self._most_at_once < samples <= self._fetched  # a last batch may be smaller
        if not tokens and not is_all and 0 < self._fetched <= most:  # or an evaluation has fetched too
            samples = self._fetched
        return tokens, samples, calls

    def fetched(self, num_samples: int) -> None:
        """Note a batch of a DataLoader, 0 if its size is not known."""
        self._fetched += num_samples
        self._most_at_once = max(self._most_at_once, num_samples)

    def joined(self, following: StepFacts) -> StepFacts:
        """Return what is known about this step and the next one as a single step."""
        both = StepFacts()
        if self.given_tokens or following.given_tokens:
            both.given_tokens = (self.given_tokens or 0) + (following.given_tokens or 0)
        both.loss = self.loss if following.loss is None else following.loss
        both.num_skipped = self.num_skipped + following.num_skipped
        both._fetched = self._fetched + following._fetched
        both._most_at_once = max(self._most_at_once, following._most_at_once)
        both._waiting = following._waiting
        for root in {**self._batches, **following._batches}:
            first, second = (each._batches.get(root, (0, 0, 0)) for each in (self, following))
            both._batches[root] = (first[0] + second[0], first[1] + second[1], first[2] + second[2])
        return both

    def count_batch(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Note the batch of a forward. Return its samples."""
        size = batch_size(args, kwargs)
        key, num_tokens, num_samples = id(root), size.num_tokens or 0, size.num_samples or 0
        before = self._waiting.get(key)
        if before is None or num_samples == 1 or num_tokens:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(given, torch.Tensor):
                if self._inputs and is_known(given, key, self._inputs):
                    return size.num_samples
                self._inputs.append((weakref.ref(given), key))
        if before is not None:
            num_tokens, num_samples = before[0] + num_tokens, num_samples + (before[1] if num_samples == 1 else 0)
        self._waiting[key] = num_tokens, num_samples, weakref.ref(root)
        return size.num_samples

    def count_usual(self, forward: Forward) -> None:
        """Note the batch of a forward that waits alone for its backward."""
        key, root, size, given, is_known = forward
        if given is not None:
            self._inputs.append((given, key))
        if not is_known:
            self._waiting[key] = size.num_tokens or 0, size.num_samples or 0, root

    def backward_begins(self, gradients: GradientState) -> None:
        """Count the forward that waits for a backward; of several, remember the gradients of their models."""
        if len(self._waiting) > 1:
            self._gradients = {key: gradients(root) for key, root in self._waiting_roots()}
        else:
            self._count(list(self._waiting))

    def backward_ended(self, gradients: GradientState) -> None:
        """Count the forwards that the backward has reached: all that wait, if no gradient shows which."""
        if not self._gradients:
            return
        before, self._gradients = self._gradients, {}
        waiting = [(key, root) for key, root in self._waiting_roots() if key in before]
        reached = [key for key, root in waiting if gradients(root) != before[key]]
        self._count(reached or list(self._waiting))

    def _waiting_roots(self) -> list[tuple[int, nn.Module]]:
        return [(key, root) for key, (_, _, one) in self._waiting.items() if (root := one()) is not None]

    def _count(self, keys: list[int]) -> None:
        for key in keys:
            new_tokens, new_samples, _ = self._waiting.pop(key)
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
            trained = [parameter for parameter in parameters_in(root) if parameter.requires_grad]
            chosen = {0, len(trained) // 2, len(trained) - 1} if trained else ()
            probes = self._probes[root] = [weakref.ref(trained[i]) for i in chosen]
        gradients = [getattr(probe(), "grad", None) for probe in probes]
        return tuple(None if grad is None else (id(grad), grad._version) for grad in gradients)


def _kept(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that can be read later. The next run of a CUDA graph would overwrite its output."""
    has_graphs = loss.is_cuda and "torch._inductor.cudagraph_trees" in sys.modules
    if has_graphs and not torch.cuda.is_current_stream_capturing():  # add nothing to the script's own graph
        return loss.detach().clone()
    return loss.detach()


NotedStep = tuple[TimedStep, StepFacts, int]
"""A step, what is known of it, and how much it compiled."""


def joined_steps(steps: list[NotedStep]) -> NotedStep:
    timed, facts, nums_compiles = zip(*steps)
    return reduce(TimedStep.joined, timed), reduce(StepFacts.joined, facts), sum(nums_compiles)
