"""The ops in the graphs that torch.compile was given: compiled code calls none of them by name.

torch writes every graph it compiles to its structured log, `torch.__trace`, while that log has a handler; we are one.
"""

from __future__ import annotations

import logging
import re
from collections import Counter

from stepscope.workloads.workload import CAPTURED, LOWERED

# As captured from Python, and as handed to the compiler's back end with autograd and decompositions done.
CAPTURED_GRAPH = "dynamo_output_graph"
LOWERED_GRAPHS = ("aot_forward_graph", "aot_backward_graph", "aot_inference_graph")
_LOWERED_OP = re.compile(r"torch\.ops\.(\w+)\.(\w+)")
_CAPTURED_CALL = re.compile(r"[\w\])]\.(\w+)\(")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)  # the line of Python that a call comes from, calls and all
_WITH_MASK = re.compile(r"\.scaled_dot_product_attention\([^;\n]*attn_mask = (?!None)")


class CompiledGraphs(logging.Handler):
    """`ops`: name → how often it stands in a graph compiled between `start()` and `stop()`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self._logger = logging.getLogger("torch.__trace")

    def start(self) -> None:
        self._logger.addHandler(self)

    def stop(self) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        metadata, payload = getattr(record, "metadata", None), getattr(record, "payload", None)
        if isinstance(metadata, dict) and isinstance(payload, str):
            if CAPTURED_GRAPH in metadata:
                self.ops.update(captured_ops(payload))
            elif any(kind in metadata for kind in LOWERED_GRAPHS):
                self.ops.update(lowered_ops(payload))


def captured_ops(graph: str) -> Counter[str]:
    """Calls in a captured graph, as ops; attention with a mask under a name of its own besides.

    >>> dict(captured_ops("# code: y = x.softmax(-1).sum()\\ny = torch.softmax(x, dim = -1);  z = y.sum()"))
    {'captured aten::softmax': 1, 'captured aten::sum': 1}
    """
    graph = _COMMENT.sub("", graph)
    found = Counter(f"{CAPTURED}aten::{name}" for name in _CAPTURED_CALL.findall(graph))
    found.update(f"{CAPTURED}attn_mask" for _ in _WITH_MASK.findall(graph))
    return found


def lowered_ops(graph: str) -> Counter[str]:
    """Ops in a graph of ops.

    >>> dict(lowered_ops("mm: f32[4, 4] = torch.ops.aten.mm.default(a, b)"))
    {'lowered aten::mm': 1}
    """
    return Counter(f"{LOWERED}{namespace}::{name}" for namespace, name in _LOWERED_OP.findall(graph))
