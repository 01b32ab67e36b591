"""What a root module is called with: the size of its batch, and whether it is the same data as before."""

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from stepscope.recorder.modes import unseen
from stepscope.recorder.values import items_of, tensors_in

MAX_INPUTS = 32  # tensors of a call that are looked at for the size of its batch
MAX_LOOKED_AT = 1000  # values among which they are
MAX_KNOWN = 64  # earlier inputs that a new one is compared with: an episode can have thousands

Inputs = list[tuple[weakref.ref[torch.Tensor], int]]
"""Of the calls of a step so far, each with the id of its root."""


def is_known(given: torch.Tensor, key: int, inputs: Inputs) -> bool:
    """Return whether the same root was called with the same data before."""
    for reference, by in inputs[-MAX_KNOWN:]:
        if by == key and (seen := reference()) is not None and _is_same(seen, given):
            return True
    return False


def _is_same(seen: torch.Tensor, given: torch.Tensor) -> bool:
    """Return whether an input that is still alive has the same data: itself, or detached from its graph."""
    try:
        return seen is given or (
            seen.shape == given.shape and seen.data_ptr() == given.data_ptr() and seen.stride() == given.stride()
        )
    except RuntimeError:
        return False  # a tensor without storage


class BatchSize(NamedTuple):
    """The size of the batch in one call of the root module. Tokens are None if they cannot be determined."""

    num_tokens: int | None
    num_samples: int | None


MAX_SIZES = 256
_known_sizes: dict[tuple[Any, ...], BatchSize] = {}  # by the names, shapes and dtypes of the inputs


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchSize:
    """Return samples from the first tensor's first dimension, and tokens if the model reads integers.

    >>> batch_size((torch.zeros(8, 128, dtype=torch.long),), {})
    BatchSize(num_tokens=1024, num_samples=8)
    >>> batch_size((torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)), {})
    BatchSize(num_tokens=None, num_samples=8)
    >>> batch_size((torch.zeros(8, 3, 32, 32), torch.zeros(8, 77, dtype=torch.long)), {})
    BatchSize(num_tokens=None, num_samples=8)
    >>> batch_size((), {"labels": torch.zeros(8, dtype=torch.long), "ids": torch.zeros(8, 16, dtype=torch.long)})
    BatchSize(num_tokens=128, num_samples=8)
    >>> batch_size((torch.zeros(4),), {})  # one state of a simulation
    BatchSize(num_tokens=None, num_samples=1)
    >>> batch_size((torch.tensor(0.5), torch.zeros(20, 2)), {})  # a time, and the batch
    BatchSize(num_tokens=None, num_samples=20)
    >>> batch_size(([torch.zeros(3, 32, 48), torch.zeros(3, 48, 32)], [{"boxes": torch.zeros(1, 4)}]), {})
    BatchSize(num_tokens=None, num_samples=2)
    """
    # This may run at every step: sizes that were seen before are looked up.
    parts: list[Any] = [*kwargs]
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is torch.Tensor and not value.is_nested:  # a nested one has no shape
            parts += value.shape, value.dtype
        elif value is None or isinstance(value, (int, float, str)):
            parts.append(None)
        else:
            return unseen(_new_batch_size, args, kwargs)  # a subclass of Tensor would see what is read from it
    key = tuple(parts)
    found = _known_sizes.get(key)
    if found is None:
        if len(_known_sizes) >= MAX_SIZES:
            _known_sizes.clear()
        found = _known_sizes[key] = _new_batch_size(args, kwargs)
    return found


def _new_batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchSize:
    named = list(_input_ids((args, kwargs)))
    if named:
        return BatchSize(sum(map(torch.Tensor.numel, named)), named[0].size(0))
    tensors = list(islice(tensors_in((*args, *kwargs.values()), 2, MAX_LOOKED_AT), MAX_INPUTS))
    if not tensors:
        return BatchSize(None, None)
    if num_pictures := _pictures(args[0] if args else next(iter(kwargs.values()))):
        return BatchSize(None, num_pictures)
    first = next((tensor for tensor in tensors if tensor.dim()), tensors[0])  # a time may come before the batch
    num_dimensions, is_whole = first.dim(), _has_integers(first)
    is_vector_of_floats = num_dimensions == 1 and not is_whole  # one state of a simulation, not a batch
    num_samples = first.size(0) if num_dimensions and not is_vector_of_floats else 1
    # Labels may come before the text, and a table of edges or a mask of pixels is not one row of text per sample.
    max_dimensions = 9 if is_whole else 2
    has_pictures = num_dimensions > 2 and not is_whole  # with captions: pairs are counted
    for one in () if has_pictures else tensors:
        if _has_integers(one) and 2 <= one.dim() <= max_dimensions and one.size(0) == num_samples:
            return BatchSize(one.numel(), num_samples)
    is_text = len(tensors) == 1 and num_dimensions == 1 and is_whole
    return BatchSize(first.numel() if is_text else None, num_samples)


def _input_ids(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the texts of a batch: one, or a column each of the pairs that a sentence encoder compares."""
    if isinstance(value, dict):
        named = dict.get(value, "input_ids")
        if isinstance(named, torch.Tensor) and named.dim() > 1:
            yield named
    elif depth:
        for one in islice(items_of(value), MAX_INPUTS):
            yield from _input_ids(one, depth - 1)


def _pictures(value: Any) -> int:
    """Return how many pictures a list has, each a tensor of its own size as detectors take them; else 0."""
    pictures = list(items_of(value)) if isinstance(value, (list, tuple)) else []
    are_pictures = all(isinstance(one, torch.Tensor) and one.dim() == 3 and one.size(0) in (1, 3) for one in pictures)
    return len(pictures) if are_pictures and not any(map(_has_integers, pictures)) else 0


def _has_integers(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
