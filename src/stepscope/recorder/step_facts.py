"""What is known about the open step besides its times: its batch, its loss, its skipped updates."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import reduce
from itertools import islice
from typing import Any

import torch
from torch import nn

from stepscope.recorder.clock import EVALUATION, FORWARD_IN_EVAL_MODE, ROLLOUT, TimedStep
from stepscope.recorder.inputs import MAX_INPUTS, MAX_LOOKED_AT, BatchSize, Inputs, batch_size, is_known
from stepscope.recorder.values import parameters_in, tensors_in

GradientState = Callable[[nn.Module], tuple[Any, ...]]


# A forward of a usual step: its root (id and reference), its batch, its first input, whether that was seen before.
Forward = tuple[int, weakref.ref[nn.Module], BatchSize, "weakref.ref[torch.Tensor] | None", bool]


class StepFacts:
    """What is known about the open step besides its times.

    A forward counts when a backward reaches it: samples that a GAN draws to look at do not. Calls that share a
    backward (an unrolled cell, two views of an image) are one micro-batch with the samples of the last. Their tokens
    add up, and so do single samples, the steps of an episode. They do not if a call goes on from what an earlier one
    made, with no action drawn in between: a sequence read step by step. Calls with the same input have one batch: a
    closure that an optimizer calls again.

    A model may be given more rows than a DataLoader gave samples: nodes of graphs, views of images. The samples are
    then those that the loader gave for the step.
    """

    def __init__(self) -> None:
        self.given_tokens: int | None = None
        self.loss: Any = None
        self.losses: list[Any] = []  # of each backward, None if it is not a number
        self.num_skipped = 0
        # Samples that DataLoaders gave, and most at once, as far as known: not in usual steps, which have one model.
        self._fetched = self._most_at_once = 0
        # Of them: what no forward has used yet, what those of this step have, and the last that has used any.
        self._ahead = self._used = self._in_hand = 0
        self.by_loader = False
        """Whether samples are what a loader gave, because the model is given more rows."""
        self._has_acted = False
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

    def note_loss(self, loss: Any) -> None:
        """Note what is passed to a backward, None if it is not a number."""
        self.give(loss=loss)
        self.losses.append(None if loss is None else self.loss)

    @property
    def batch(self) -> tuple[int, int, int]:
        """Tokens, samples and micro-batches of a step: what every trained model has seen at least.

        A GAN's discriminator sees each image as often as it is compared; its generator makes it once. If that makes
        more, for a second loss, or less, while its critic learns, the samples are those that the loop has fetched.
        """
        batches = self._batches or {key: (tokens, samples, 1) for key, (tokens, samples, _) in self._waiting.items()}
        if len(batches) == 1:
            tokens, samples, calls = next(iter(batches.values()))
            return tokens, (self._used or self._in_hand) if self.by_loader and not tokens else samples, calls
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
        self._ahead += num_samples
        self._most_at_once = max(self._most_at_once, num_samples)

    def called_as(self, label: str) -> None:
        """Note what a forward is for: what is fetched for an evaluation trains nothing."""
        if label in (EVALUATION, ROLLOUT, FORWARD_IN_EVAL_MODE):
            self._ahead = 0

    def following(self) -> StepFacts:
        """Return those of the next step, which may use what this one has fetched."""
        following = StepFacts()
        following._ahead, following._in_hand = self._ahead, self._in_hand
        following.by_loader = self.by_loader
        return following

    def acted(self) -> None:
        """Note that something was drawn from what a model has made: an action."""
        self._has_acted = True

    def joined(self, following: StepFacts) -> StepFacts:
        """Return what is known about this step and the next one as a single step."""
        both = StepFacts()
        if self.given_tokens or following.given_tokens:
            both.given_tokens = (self.given_tokens or 0) + (following.given_tokens or 0)
        both.loss = self.loss if following.loss is None else following.loss
        both.losses = self.losses + following.losses
        both.num_skipped = self.num_skipped + following.num_skipped
        both._fetched = self._fetched + following._fetched
        both._most_at_once = max(self._most_at_once, following._most_at_once)
        both._ahead, both._in_hand = following._ahead, following._in_hand
        both._used = self._used + following._used
        both.by_loader = following.by_loader
        both._waiting = following._waiting
        for root in {**self._batches, **following._batches}:
            first, second = (each._batches.get(root, (0, 0, 0)) for each in (self, following))
            both._batches[root] = (first[0] + second[0], first[1] + second[1], first[2] + second[2])
        return both

    def count_batch(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Note the batch of a forward. Return its samples."""
        size = batch_size(args, kwargs)
        key, num_tokens, num_samples = id(root), size.num_tokens or 0, size.num_samples or 0
        if self._ahead:
            self.by_loader |= num_samples > self._ahead > 1  # one may be a whole batch
            self._in_hand, self._ahead = self._ahead, 0
            self._used += self._in_hand
        before = self._waiting.get(key)
        if before is None or num_samples == 1 or num_tokens:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(given, torch.Tensor):
                if self._inputs and is_known(given, key, self._inputs):
                    return size.num_samples
                self._inputs.append((weakref.ref(given), key))
        if before is not None:
            is_another = num_samples == 1 and (self._has_acted or not _goes_on((args, kwargs)))
            num_tokens, num_samples = before[0] + num_tokens, num_samples + (before[1] if is_another else 0)
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


def _goes_on(given: Any) -> bool:
    """Return whether a call is given what an earlier one has made: a hidden state."""
    return any(tensor.grad_fn is not None for tensor in islice(tensors_in(given, 3, MAX_LOOKED_AT), MAX_INPUTS))


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
