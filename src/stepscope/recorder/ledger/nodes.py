"""Reads the autograd graph: which module's forward made a node, and which tensors a graph has saved."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch

from stepscope.recorder.compiler.provenance import common_module
from stepscope.recorder.ledger.storages import storage_key, storage_of

# Both are private to torch. Without them, allocations in the backward have no module.
current_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence_number: Any = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)

SHOWS_SAVED_TENSORS = hasattr(torch._C._autograd.SavedTensor, "data")
"""Whether torch shows what a node has saved without running its unpack hooks."""


def backward_runs() -> bool:
    """Return whether autograd's engine is running on this thread."""
    return bool(torch._C._current_graph_task_id() >= 0)


def next_sequence_number() -> int:
    """Return the number that the next node made on this thread will have."""
    return int(_next_sequence_number())


class NodeModules:
    """Maps nodes to the module that was open when they were made: each thread numbers its nodes in order."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self.names: dict[int, str] = {}  # id of a module → its name
        self._marks: dict[int, tuple[list[int], list[str | None]]] = {}

    def open(self, name: str | None) -> None:
        """Assign nodes made on this thread from now on to `name`."""
        numbers, names = self._marks.setdefault(threading.get_ident(), ([], []))
        numbers.append(next_sequence_number())
        names.append(name)

    def made(self) -> dict[str, int]:
        """Return how many nodes the forward of each module has made on this thread."""
        found: dict[str, int] = {}
        numbers, names = self._marks.get(self._home, ([], []))
        for first, end, name in zip(numbers, [*numbers[1:], next_sequence_number()], names):
            if name is not None and end > first:
                found[name] = found.get(name, 0) + end - first
        return found

    def running(self) -> tuple[Any, str | None]:
        """Return the node whose backward runs on this thread, and its module; (None, None) outside a backward."""
        node = current_node()
        return (None, None) if node is None else (node, self.of(node))

    def of(self, node: Any) -> str | None:
        """Return the innermost module whose forward made a node, or None if unknown."""
        if not hasattr(node, "_sequence_nr"):
            return None
        checkpointed = getattr(node, "run_function", None)  # in a reentrant checkpoint
        while isinstance(checkpointed, partial):
            checkpointed = checkpointed.func
        checkpointed = getattr(checkpointed, "__self__", checkpointed)  # the module of a bound method
        if id(checkpointed) in self.names:
            return self.names[id(checkpointed)]
        number, thread = int(node._sequence_nr()), threading.get_ident()
        made_here = None
        if thread != self._home and number < next_sequence_number():
            made_here = self._at(thread, number)  # by a checkpointed forward that ran again on an autograd thread
        made_home = self._at(self._home, number)
        if made_here is None or made_home is None:
            return (made_here or made_home or (None,))[0]
        return made_here[0] if made_here == made_home else None

    def _at(self, thread: int, number: int) -> tuple[str | None] | None:
        numbers, names = self._marks.get(thread, ([], []))
        position = bisect_right(numbers, number) - 1
        return (names[position],) if position >= 0 else None


def saved_tensors(roots: Iterable[Any], seen: dict[int, Any]) -> Iterator[tuple[Any, torch.Tensor, Any]]:
    """Yield (node, tensor, checkpoint or None) for everything that the graphs below `roots` keep for backward.

    A checkpoint is given for the tensors that it restarts from. `seen` maps the id of each visited node to the node.
    Those are not visited again.
    """
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        waiting.extend(following for following, _ in node.next_functions)
        for name in _saved_names(node.__class__):
            try:
                saved = getattr(node, name)
            except RuntimeError:
                continue  # its backward has run, so nothing is saved any more
            for entry in saved if isinstance(saved, (tuple, list)) else (saved,):
                for tensor, checkpoint in _kept(entry, waiting):
                    yield node, tensor, checkpoint


def saved_bytes(
    roots: Iterable[Any], modules: NodeModules, is_parameter: Callable[[int], bool]
) -> dict[str | None, tuple[int, int]]:
    """Return bytes and number of saved storages below `roots` by module, each storage once, without parameters.

    The inputs of a checkpoint count for the module that encloses everything the checkpoint computes.
    """
    found: dict[int, tuple[int, Any, Any]] = {}  # storage -> bytes, node, checkpoint
    around: dict[int, str | None] = {}  # checkpoint -> module
    for node, tensor, checkpoint in saved_tensors(roots, seen={}):
        if checkpoint is not None:
            module = modules.of(node)
            known = around.get(id(checkpoint), module)
            around[id(checkpoint)] = None if module is None or known is None else common_module((known, module))
        key = storage_key(tensor)
        if key is not None and key not in found and not is_parameter(key):
            found[key] = (storage_of(tensor).nbytes(), node, checkpoint)
    saved: dict[str | None, tuple[int, int]] = {}
    for size, node, checkpoint in found.values():
        module = modules.of(node) if checkpoint is None else around[id(checkpoint)]
        num_bytes, num = saved.get(module, (0, 0))
        saved[module] = (num_bytes + size, num + 1)
    return saved


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_")) if SHOWS_SAVED_TENSORS else ()


def _kept(saved: Any, waiting: list[Any]) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield the tensor behind a saved value; for a checkpoint, the inputs that it restarts from, and itself."""
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
    """Yield what the node that saves a checkpoint's inputs keeps, before torch 2.13."""
    for name in _saved_names(saver.__class__):
        for entry in getattr(saver, name, ()):
            if isinstance(getattr(entry, "data", None), torch.Tensor):
                yield entry.data
