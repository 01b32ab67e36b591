"""Which module each call of compiled code comes from, read from Inductor's comments while it compiles.

In Inductor's code each call has a comment with the graph nodes that it computes, and each node keeps the stack of
modules it was traced in. Both exist when torch logs the code, so no setting has to change what is compiled or cached.
The graph is taken from the frame that logs. What a torch version does not show is left out.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

MAX_CALLS = 20_000  # recorded in all graphs of a run together
_SOURCES = re.compile(r"# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*?)\]")
_CALL = re.compile(r"\b(triton_\w+)\.run\(|\bextern_kernels\.(\w+)\(|\btorch\.ops\.(\w+)\.(\w+)\.\w+\(")
_ROOT = re.compile(r"^L(?:\['\w+'\]|__\w+?__)")
_PART = re.compile(r"_modules\['([^']*)'\]|\['?([^\]']*)'?\]|([^.\[\]]+)")


class Provenance:
    """Receives torch's log. `graphs` are the compiled graphs with their calls in order, and each call's module."""

    def __init__(self) -> None:
        self.graphs: list[dict[str, Any]] = []
        self._num_calls = 0
        self._captured: dict[Any, dict[str, set[str]]] = {}
        self._keys: dict[Any, list[str | None]] = defaultdict(list)
        self._without_key: dict[Any, list[dict[str, Any]]] = defaultdict(list)

    def captured(self, compile_id: Any) -> None:
        """Keep the graph that Dynamo captured: a graph from a cache has no other."""
        self._captured[compile_id] = nodes_of(graph_that_is_logged())

    def code(self, compile_id: Any, text: str) -> None:
        """Read the code that Inductor logs for one graph."""
        graph = graph_that_is_logged()
        nodes = nodes_of(graph) if graph is not None else self._captured.get(compile_id, {})
        calls = [[name, common_module(module for node in made for module in nodes.get(node, ()))]
                 for name, made in calls_of(text)]  # fmt: skip
        calls = calls[: max(0, MAX_CALLS - self._num_calls)]
        self._num_calls += len(calls)
        is_backward = "_backward']" in text[:200]
        entry = {"compile_id": compile_id_text(compile_id), "key": None, "is_backward": is_backward, "calls": calls}
        self.graphs.append(entry)
        if self._keys[compile_id]:
            entry["key"] = self._keys[compile_id].pop(0)
        else:
            self._without_key[compile_id].append(entry)

    def cache(self, compile_id: Any, key: str | None) -> None:
        """Set the cache key of a graph, before or after its code is logged. The profiler names calls by it."""
        if self._without_key[compile_id]:
            self._without_key[compile_id].pop(0)["key"] = key
        else:
            self._keys[compile_id].append(key)


def graph_that_is_logged() -> Any:
    """Return the innermost graph module in a torch frame that is logging now, or None."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        graph = frame.f_locals.get("gm") if "torch" in frame.f_code.co_filename else None
        if graph is not None and hasattr(graph, "graph"):
            return graph
        frame = frame.f_back
    return None


def nodes_of(graph: Any) -> dict[str, set[str]]:
    """Return the modules that each node was traced in, by the node's name in Inductor's comments."""
    modules: dict[str, set[str]] = defaultdict(set)
    for node in graph.graph.nodes if graph is not None else ():
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            path = next(reversed(stack.values()))
            origin = (node.meta.get("from_node") or [node])[0]  # in the captured graph; a backward node has none
            name = str(origin[0] if isinstance(origin, tuple) else origin.name)
            modules[name].add(module_path(str(path[0] if isinstance(path, tuple) else path)))
    return dict(modules)


def module_path(path: str) -> str:
    """Return a module's path in `named_modules`, from the expression by which Dynamo reaches it.

    >>> module_path("L['self']._modules['blocks']._modules['0'].attention")
    'blocks.0.attention'
    >>> module_path("L['self'].blocks[0].mlp")
    'blocks.0.mlp'
    """
    parts = ["".join(found) for found in _PART.findall(_ROOT.sub("", path))]
    return ".".join(part for part in parts if part and part != "_modules")


def calls_of(code: str) -> list[tuple[str, list[str]]]:
    """Return the calls of kernels and ops in Inductor's code, in order, each with the nodes that it computes.

    >>> calls_of("# Topologically Sorted Source Nodes: [linear, gelu], Original ATen: []\\nextern_kernels.mm(a, b)")
    [('aten::mm', ['linear', 'gelu'])]
    """
    found: list[tuple[str, list[str]]] = []
    nodes: list[str] = []
    for line in code.splitlines():
        if match := _SOURCES.search(line):
            nodes = [name.strip() for name in match.group(1).split(",") if name.strip()]
        elif (match := _CALL.search(line)) and not line.lstrip().startswith("#"):
            kernel, library, space, op = match.groups()
            found.append((kernel or f"{space or 'aten'}::{op or library}", nodes))
            nodes = []
    return found


def common_module(modules: Iterable[str]) -> str | None:
    """Return the innermost module that contains all of these; "" is the compiled module itself, None is unknown.

    >>> common_module(["blocks.0.norm", "blocks.0.attention.query"])
    'blocks.0'
    """
    paths = [path.split(".") for path in set(modules)]
    if not paths:
        return None
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths))
    return ".".join(parts[0] for parts in shared)


def compile_id_text(compile_id: Any) -> str:
    """Return `0/1` for a frame id and its compile count."""
    return "/".join(map(str, compile_id)) if isinstance(compile_id, tuple) else str(compile_id)
