"""The autograd graph as the ledger reads it: which module's forward made a node, and what a graph has saved."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from stepscope.recorder.ledger.storages import storage_key, storage_of

# Both are private to torch; where a release has them no more, what the backward allocates has no module.
_current_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence_number: Any = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)

SHOWS_SAVED_TENSORS = hasattr(torch._C._autograd.SavedTensor, "data")
"""Whether torch shows what a node has saved without running the hooks that would bring it back."""


def backward_runs() -> bool:
    """Whether autograd's engine runs on this thread: what is called now, a backward calls."""
    return bool(torch._C._current_graph_task_id() >= 0)


def next_sequence_number() -> int:
    """The number that the next node made on this thread will have."""
    return int(_next_sequence_number())


class NodeModules:
    """The module that was open when a node was made: a thread numbers its nodes in the order it makes them."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self.names: dict[int, str] = {}
        """Id of a module → its name."""
        self._marks: dict[int, tuple[list[int], list[str | None]]] = {}

    def open(self, name: str | None) -> None:
        """From here on nodes made on this thread belong to `name`."""
        numbers, names = self._marks.setdefault(threading.get_ident(), ([], []))
        numbers.append(next_sequence_number())
        names.append(name)

    def running(self) -> tuple[Any, str | None]:
        """The node whose backward runs now on this thread, and its module; (None, None) outside a backward."""
        node = _current_node()
        return (None, None) if node is None else (node, self.of(node))

    def of(self, node: Any) -> str | None:
        """The innermost module whose forward made a node; None when that cannot be told."""
        if not hasattr(node, "_sequence_nr"):
            return None
        checkpointed = _bound_to(getattr(node, "run_function", None))  # of a reentrant checkpoint
        if id(checkpointed) in self.names:
            return self.names[id(checkpointed)]
        number, thread = int(node._sequence_nr()), threading.get_ident()
        made_here = None
        if thread != self._home and number < next_sequence_number():
            made_here = self._at(thread, number)  # by a checkpointed forward that ran again on a thread of autograd's
        made_home = self._at(self._home, number)
        if made_here is None or made_home is None:
            return (made_here or made_home or (None,))[0]
        return made_here[0] if made_here == made_home else None

    def _at(self, thread: int, number: int) -> tuple[str | None] | None:
        numbers, names = self._marks.get(thread, ([], []))
        position = bisect_right(numbers, number) - 1
        return (names[position],) if position >= 0 else None


def saved_tensors(roots: Iterable[Any], seen: dict[int, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """(node, tensor) of everything that the graphs below `roots` keep for their backward.

    `seen` maps the id of each node that was visited to the node: it is not visited again.
    """
    return ((node, tensor) for node, tensor, _ in _saved(roots, seen))


def _saved(roots: Iterable[Any], seen: dict[int, Any]) -> Iterator[tuple[Any, torch.Tensor, Any]]:
    """The same, with the checkpoint that starts again from the tensor, or None.

    `seen` maps the id of each node that was visited to the node: it is not visited again.
    """
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        waiting.extend(following for following, _ in node.next_functions)
        for name in _saved_names(type(node)):
            try:
                saved = getattr(node, name)
            except RuntimeError:
                continue  # its backward has been run: nothing is kept any more
            for entry in saved if isinstance(saved, (tuple, list)) else (saved,):
                for tensor, checkpoint in _kept(entry, waiting):
                    yield node, tensor, checkpoint


def saved_bytes(
    roots: Iterable[Any], modules: NodeModules, is_parameter: Callable[[int], bool]
) -> dict[str | None, tuple[int, int]]:
    """Bytes and number of storages saved below `roots` by module; parameters left out, each storage once.

    What a checkpoint starts again from is saved by the module that is around all that the checkpoint computes.
    """
    found: dict[int, tuple[int, Any, Any]] = {}  # storage -> bytes, node, checkpoint
    around: dict[int, str | None] = {}  # checkpoint -> module
    for node, tensor, checkpoint in _saved(roots, seen={}):
        if checkpoint is not None:
            module = modules.of(node)
            around[id(checkpoint)] = _common(around.get(id(checkpoint), module), module)
        key = storage_key(tensor)
        if key is not None and key not in found and not is_parameter(key):
            found[key] = (storage_of(tensor).nbytes(), node, checkpoint)
    saved: dict[str | None, tuple[int, int]] = {}
    for size, node, checkpoint in found.values():
        module = modules.of(node) if checkpoint is None else around[id(checkpoint)]
        num_bytes, num = saved.get(module, (0, 0))
        saved[module] = (num_bytes + size, num + 1)
    return saved


def _common(one: str | None, other: str | None) -> str | None:
    """The innermost module around both.

    >>> _common("blocks.1.up", "blocks.1.down"), _common("blocks.1", "head"), _common("head", None)
    ('blocks.1', '', None)
    """
    if one is None or other is None:
        return None
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split(".")))
    return ".".join(name for name, _ in shared)


def _bound_to(function: Any) -> Any:
    """The module behind a checkpointed function: itself, or what a bound or partial call of it is bound to."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__self__", function)


_names_by_type: dict[type, list[str]] = {}


def _saved_names(kind: type) -> list[str]:
    if not SHOWS_SAVED_TENSORS:
        return []
    if kind not in _names_by_type:
        _names_by_type[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return _names_by_type[kind]


def _kept(saved: Any, waiting: list[Any]) -> Iterator[tuple[torch.Tensor, Any]]:
    """The tensor behind one saved value; behind a checkpoint's, the inputs that it will start again from, and it."""
    data = getattr(saved, "data", None)
    if isinstance(data, torch.Tensor):
        yield data, None
    elif data is not None:
        for cell in getattr(saved.unpack_hook, "__closure__", None) or ():
            try:
                frame = cell.cell_contents
            except ValueError:
                continue  # nothing is in it yet
            saver = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
            for tensor in _inputs(saver):
                yield tensor, frame
            waiting.append(saver)
            for argument in getattr(frame, "saved_args", ()):
                if isinstance(argument, torch._C._autograd.SavedTensor) and isinstance(argument.data, torch.Tensor):
                    yield argument.data, frame


def _inputs(saver: Any) -> Iterator[torch.Tensor]:
    """What the node keeps that saves a checkpoint's inputs, before torch 2.13."""
    for name in _saved_names(type(saver)):
        for entry in getattr(saver, name, ()):
            if isinstance(getattr(entry, "data", None), torch.Tensor):
                yield entry.data
