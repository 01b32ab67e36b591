"""Finds graphs of earlier steps that are still alive, their bytes, and the variable that holds them."""

import ast
import gc
import linecache
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from inspect import CO_OPTIMIZED
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from stepscope.recorder.frames import is_library, script_frames
from stepscope.recorder.ledger.nodes import saved_tensors
from stepscope.recorder.ledger.storages import storage_key, storage_of

TIME_LIMIT_S = 2.0  # for finding the graphs, and again for finding the variables
MAX_DEPTH = 4  # below a variable: `trainer.history["loss"][7]` is three levels deep
MAX_ELEMENTS = 100_000  # per container: a data set in a list is not searched
MAX_LINES = 3  # reported per variable

_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType)


class Variable(NamedTuple):
    """A variable of a frame, or a value reached from one by attributes: `trainer.log`."""

    name: str
    file: str
    code: types.CodeType | None  # the function whose local it is; None for a global
    line: int | None  # the current line of its frame
    class_file: str | None = None  # for an attribute, the file that defines its class

    def place(self) -> str:
        """Return `train.py:31 losses`: the lines that fill the variable if known, else its frame's current line."""
        file, lines = self.file, lines_that_fill(self.name, self.file, self.code)
        words = self.name.split(".")
        if not lines and self.class_file and not is_library(self.class_file):
            lines = lines_that_fill(f"*.{words[-1]}", self.class_file)
            file = self.class_file if lines else file
        lines = lines or lines_that_fill(words[0], file, self.code)
        lines = lines[:MAX_LINES] or ([self.line] if self.line else [])
        return f"{Path(file).name}{':' if lines else ''}{','.join(map(str, lines))} {self.name}"


Held = tuple[torch.Tensor, "str | None"]  # a tensor, and the place of a variable that leads to it


class LeftAlive(NamedTuple):
    entries: list[dict[str, Any]]  # one for each variable that holds graphs
    held: list[Held]  # one tensor for each storage that is counted in them, and its holder
    is_complete: bool  # whether the search finished in time


def live_tensors() -> list[torch.Tensor]:
    """Return every tensor of this process that Python can see."""
    # `type(o)` instead of isinstance: on proxies, isinstance runs their own code. Fake tensors have no memory.
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and type(o).__name__ != "FakeTensor"]


def find_left_alive(step_began: int, keep: Iterable[torch.Tensor]) -> LeftAlive:
    """Return the graphs of earlier steps that are still alive. `keep` are parameters and buffers, which do not count.

    `step_began` is the sequence number at which the step that just ended began. Tensors of earlier steps count, and
    so does what they keep alive. Tensors of the last step count only if they are in a variable and keep others alive:
    `loss` is no leak after its backward, nor is a result on its way to the caller of the model.
    """
    deadline = time.perf_counter() + TIME_LIMIT_S
    counted = {storage_key(tensor) for tensor in keep} | {None}
    found: dict[int, tuple[torch.Tensor, int]] = {}
    held: list[tuple[torch.Tensor, int]] = []
    seen: dict[int, Any] = {}
    old: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():
        with_graph = [tensor for tensor in live_tensors() if tensor.grad_fn is not None]
        for tensor in sorted(with_graph, key=lambda tensor: -tensor.grad_fn._sequence_nr()):
            num_seen, num_bytes = len(seen), 0
            own_key, is_own_counted = storage_key(tensor), storage_key(tensor) in counted
            counted.add(own_key)
            for _, saved, _ in saved_tensors([tensor.grad_fn], seen):
                key = storage_key(saved)
                if key not in counted:
                    counted.add(key)
                    held.append((saved, id(tensor)))
                    num_bytes += storage_of(saved).nbytes()
                if time.perf_counter() > deadline:
                    break
            made = [tensor.grad_fn, *islice(seen.values(), num_seen, None)]
            is_old = any(node._sequence_nr() < step_began for node in made)
            if is_old:
                old.add(id(tensor))
            if is_old and not is_own_counted:
                held.append((tensor, id(tensor)))
                num_bytes += storage_of(tensor).nbytes()
            if num_bytes:
                found[id(tensor)] = (tensor, num_bytes)
            if time.perf_counter() > deadline:
                break
    is_complete = time.perf_counter() < deadline
    places = _places({id(tensor): tensor for tensor, _ in found.values()}, id)
    found = {key: entry for key, entry in found.items() if key in old or key in places}
    held_now = [(tensor, places.get(by)) for tensor, by in held if by in found]
    return LeftAlive(_by_place(found, places), held_now, is_complete)


def find_holders(tensors: list[torch.Tensor]) -> list[Held]:
    """Return the tensors, each with a variable that leads to its memory."""
    places = _places({storage_key(tensor): tensor for tensor in tensors}, storage_key)
    return [(tensor, places.get(storage_key(tensor))) for tensor in tensors]


def _places(wanted: dict[Any, torch.Tensor], key_of: Callable[[torch.Tensor], Any]) -> dict[Any, str]:
    """Return the places of the variables that lead to tensors with these keys, found within the time limit."""
    deadline, variables = time.perf_counter() + TIME_LIMIT_S, {}
    for variable, tensor in _reachable(deadline) if wanted else ():
        key = key_of(tensor)
        if key in wanted and key not in variables:
            variables[key] = variable
            if len(variables) == len(wanted):
                break
    places = {variable: variable.place() for variable in set(variables.values())}
    return {key: places[variable] for key, variable in variables.items()}


def _by_place(found: dict[int, tuple[torch.Tensor, int]], places: dict[int, str]) -> list[dict[str, Any]]:
    groups: dict[str | None, list[tuple[torch.Tensor, int]]] = {}
    for key, entry in found.items():
        groups.setdefault(places.get(key), []).append(entry)
    entries = []
    for place, group in groups.items():
        tensor, _ = max(group, key=itemgetter(1))
        entries.append(
            {
                "bytes": sum(num_bytes for _, num_bytes in group),
                "num_tensors": len(group),
                "op": tensor.grad_fn.name() if tensor.grad_fn is not None else None,
                "module": None,  # made before the window
                "frame": place,
            }
        )
    return sorted(entries, key=lambda entry: -entry["bytes"])


def _reachable(deadline: float) -> Iterator[tuple[Variable, Any]]:
    """Yield the tensors that the script's variables reach, each with its variable, the nearest first."""
    level = list(_variables())
    seen: set[int] = set()
    for _ in range(MAX_DEPTH + 1):
        below: list[tuple[Variable, Any]] = []
        for variable, value in level:
            if issubclass(type(value), torch.Tensor):
                yield variable, value
            elif id(value) not in seen and not issubclass(type(value), _PLAIN):
                seen.add(id(value))
                below.extend(_parts(variable, value))
            if time.perf_counter() > deadline:
                return
        level = below


def _variables() -> Iterator[tuple[Variable, Any]]:
    """Yield the locals and globals of every frame of the script, those of installed packages last."""
    globals_seen: set[int] = set()
    frames = sorted(script_frames(), key=lambda frame: is_library(frame.f_code.co_filename))
    for frame in frames:
        code, file, line = frame.f_code, frame.f_code.co_filename, frame.f_lineno
        if code.co_flags & CO_OPTIMIZED:
            values = frame.f_locals
            yield from [(Variable(name, file, code, line), value) for name, value in values.items()]
            # Before Python 3.13 this copy stays with the frame and would keep its values alive.
            if sys.version_info < (3, 13) and sys.getrefcount(values) <= 3:  # not a dict that locals() returned
                values.clear()
            del values
        elif id(frame.f_globals) not in globals_seen:
            globals_seen.add(id(frame.f_globals))
            yield from [(Variable(name, file, None, line), value) for name, value in list(frame.f_globals.items())]
    for frame in frames:
        if id(frame.f_globals) not in globals_seen:
            globals_seen.add(id(frame.f_globals))
            file, found = frame.f_code.co_filename, list(frame.f_globals.items())
            yield from [(Variable(name, file, None, None), value) for name, value in found]


def _parts(variable: Variable, value: Any) -> Iterator[tuple[Variable, Any]]:
    """Yield the parts of a value: elements keep their container's name, attributes add their own."""
    # Uses the built-in type's methods, because a subclass may run its own code.
    if issubclass(type(value), dict):
        yield from [(variable, item) for item in islice(dict.values(value), MAX_ELEMENTS)]
        return
    for container in _CONTAINERS:
        if issubclass(type(value), container):
            yield from [(variable, item) for item in islice(container.__iter__(value), MAX_ELEMENTS)]
            return
    try:
        attributes = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        return
    if issubclass(type(value), nn.Module):
        attributes |= attributes.get("_modules") or {}
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    for attribute, item in attributes.items():
        yield variable._replace(name=f"{variable.name}.{attribute}", class_file=file), item


_FILLING = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put")


def lines_that_fill(name: str, file: str, code: types.CodeType | None = None) -> list[int]:
    """Return the lines of a function, or of a file for a global, that add to a variable.

    `name` is `losses`, `self.log`, or `*.log` for an attribute of any variable. If no line adds to it, return the
    last line that assigns it. Empty if there is none, or no source.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    mine = None if code is None else {line for _, _, line in code.co_lines()}
    adding: set[int] = set()
    giving: set[int] = set()
    for node in ast.walk(tree) if mine is not None else _seeing(tree, name.partition(".")[0]):
        if mine is None or getattr(node, "lineno", None) in mine:
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and node.func.attr in _FILLING and _is(node.func.value, name):
                    adding.add(node.lineno)
            elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                for target in filter(lambda target: _is(target, name), _targets(node)):
                    adds = isinstance(target, ast.Subscript) or isinstance(node, ast.AugAssign)
                    adds = adds or any(_is(part, name) for part in ast.walk(node.value or target))
                    (adding if adds else giving).add(node.lineno)
    return sorted(adding) or sorted(giving)[-1:]


def _seeing(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the nodes of a file that can see a global: not those in functions with a local of that name."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and _has_own(child, name)):
            yield from _seeing(child, name)


def _has_own(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, name: str) -> bool:
    arguments = (node for node in ast.walk(function.args) if isinstance(node, ast.arg))
    if any(argument.arg == name for argument in arguments):
        return True
    inside = list(_body(function))
    if any(isinstance(node, ast.Global) and name in node.names for node in inside):
        return False
    return any(isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) for node in inside)


def _body(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _body(child)


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.expr]:
    """Return `a` and `b` for `a, b = f()`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for target in targets for part in getattr(target, "elts", [target])]


def _is(node: ast.AST, name: str) -> bool:
    found = _variable(node)
    if name.startswith("*."):
        return found is not None and found.partition(".")[2] == name[2:]
    return found == name


def _variable(node: ast.AST) -> str | None:
    """Return `self.log` for `self.log["loss"][3]`."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else getattr(node.func, "value", node.func)
    if isinstance(node, ast.Attribute):
        return f"{_variable(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None
