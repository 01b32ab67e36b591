"""What is known about the open step besides its times: its batch, its loss, its skipped updates."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from stepscope.recorder.model import batch_size


class StepFacts:
    """What is known about the open step besides its times."""

    def __init__(self) -> None:
        self.batches: dict[int, tuple[int, int, int]] = {}  # root -> tokens, samples, calls
        self.given_tokens: int | None = None
        self.loss: Any = None
        self.num_skipped = 0
        self.counted: set[int] = set()  # roots whose batch has been counted since the last backward
        # The first inputs of the counted calls, each with its root.
        self.inputs: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def batch(self) -> tuple[int, int, int]:
        """Tokens, samples and micro-batches of a step: what every trained model has seen at least.

        A GAN's discriminator sees each image as often as it is compared; its generator makes it once.
        """
        if len(self.batches) == 1:
            return next(iter(self.batches.values()))
        with_tokens = [batch for batch in self.batches.values() if batch[0]]
        return min(with_tokens or self.batches.values(), default=(0, 0, 0))

    def count_batch(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the batch of a forward.

        Calls that share a backward (an unrolled cell, two views of an image) are one micro-batch. Calls with the
        same input (a closure that an optimizer calls again) have one batch.
        """
        size = batch_size(args, kwargs)
        is_first = id(root) not in self.counted
        # Single samples that share a backward are the steps of an episode: each is one more.
        if not is_first and (size.num_samples or 0) != 1:
            return
        self.counted.add(id(root))
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, torch.Tensor):
            if any(by == id(root) and _is_same(seen(), given) for seen, by in self.inputs):
                return
            self.inputs.append((weakref.ref(given), id(root)))
        tokens, samples, calls = self.batches.get(id(root), (0, 0, 0))
        tokens, samples = tokens + (size.num_tokens or 0), samples + (size.num_samples or 0)
        self.batches[id(root)] = (tokens, samples, calls + is_first)


def _is_same(seen: torch.Tensor | None, given: torch.Tensor) -> bool:
    """Return whether an input that is still alive has the same data: itself, or detached from its graph."""
    if seen is None or seen.shape != given.shape:
        return False
    try:
        return seen is given or (seen.data_ptr() == given.data_ptr() and seen.stride() == given.stride())
    except RuntimeError:
        return False  # a tensor without storage
