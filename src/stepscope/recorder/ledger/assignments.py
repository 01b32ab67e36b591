"""Where a script puts something into a variable, read from its source."""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator

_FILLING = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put")


def lines_that_fill(name: str, file: str, code: types.CodeType | None = None) -> list[int]:
    """The lines of a file, or of one function in it, that put something into a variable; of the file, into a global.

    `name` is `losses`, `self.log`, or `*.log`, an attribute of any variable. Where no line adds to it, the last that
    gives it a value; none where there is none, or no source.
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
    """The nodes of a file that see a global: not those of functions that have a variable of its name."""
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
    """What is in a function, without the functions in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _body(child)


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.expr]:
    """`a` and `b` of `a, b = f()`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for target in targets for part in getattr(target, "elts", [target])]


def _is(node: ast.AST, name: str) -> bool:
    found = _variable(node)
    if name.startswith("*."):
        return found is not None and found.partition(".")[2] == name[2:]
    return found == name


def _variable(node: ast.AST) -> str | None:
    """`self.log` of `self.log["loss"][3]`."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else getattr(node.func, "value", node.func)
    if isinstance(node, ast.Attribute):
        return f"{_variable(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None
