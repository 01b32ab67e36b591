"""Walks over values of the script: bounded in depth and number, and without running code of theirs."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

MAX_DEPTH = 8
MAX_VALUES = 1_000_000  # looked at in one walk: a list may contain itself, twice


def items_of(value: Any) -> Iterable[Any]:
    """Return the items of a list or a tuple, or the values of a dictionary, as the built-in type has them."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict.values(value)
    if issubclass(kind, list):
        return list.__iter__(value)
    return tuple.__iter__(value) if issubclass(kind, tuple) else ()


def tensors_in(value: Any, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, and in lists, tuples and dictionaries inside it.

    >>> [tensor.item() for tensor in tensors_in([torch.tensor(1), {"a": (torch.tensor(2), "text")}])]
    [1, 2]
    """
    if isinstance(value, torch.Tensor):
        return iter((value,))
    return _walk(value, max_depth, [max_values])


def _walk(value: Any, depth: int, num_left: list[int]) -> Iterator[torch.Tensor]:
    for item in items_of(value):
        num_left[0] -= 1
        if num_left[0] < 0:
            return
        if isinstance(item, torch.Tensor):
            yield item
        elif depth and isinstance(item, (list, tuple, dict)):
            yield from _walk(item, depth - 1, num_left)
