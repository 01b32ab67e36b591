"""Walks over values of the script: bounded in depth and number, and without running code of theirs.

The parts of a module come from nn.Module's own tables, since a class may override `parameters()` and the like.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

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


def named_modules_in(root: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the fully qualified name and module, once each, for a module and then its parts, in their order."""
    waiting, seen = [(name, root)], set()
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        parts = [(key, part) for key, part in module._modules.items() if part is not None]
        waiting.extend((f"{name}.{key}" if name else key, part) for key, part in reversed(parts))


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    return (module for _, module in named_modules_in(root))


def named_parameters_in(root: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the fully qualified name and parameter, once each.

    >>> [name for name, _ in named_parameters_in(nn.Sequential(nn.Linear(2, 2)), "model")]
    ['model.0.weight', 'model.0.bias']
    """
    return _named(root, "_parameters", name)


def parameters_in(root: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for _, parameter in named_parameters_in(root))


def named_buffers_in(root: nn.Module, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    return _named(root, "_buffers", name)


def _named(root: nn.Module, table: str, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    seen = set()
    for name, module in named_modules_in(root, prefix):
        for key, tensor in getattr(module, table).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{name}.{key}" if name else key, tensor


def is_capturing() -> bool:
    """Return whether the script captures a CUDA graph: then nothing may be added to it."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether reading a tensor runs no code of the script: no `__torch_dispatch__` of its own class."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def stored(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold a tensor's values: a sparse one consists of several, any other of itself.

    >>> [part.tolist() for part in stored(torch.eye(2).to_sparse())]
    [[[0, 1], [0, 1]], [1.0, 1.0]]
    """
    parts = _PARTS.get(tensor.layout)
    return (tensor,) if parts is None else tuple(getattr(tensor, part)() for part in parts)


def stored_in(value: Any) -> Any:
    """Return a value, or the arguments of an op, with the parts of each sparse tensor in its place."""
    if isinstance(value, torch.Tensor):
        return value if value.layout not in _PARTS else stored(value)
    if any(tensor.layout in _PARTS for tensor in tensors_in(value)):
        if isinstance(value, dict):
            return {key: stored_in(item) for key, item in value.items()}
        return tuple(stored_in(item) for item in items_of(value)) if isinstance(value, (list, tuple)) else value
    return value
