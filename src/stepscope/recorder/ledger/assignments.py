"""Finds the source lines at which a script assigns or adds to a variable."""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator

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
