"""Counts the ops in the graphs that torch.compile compiles: compiled code does not call them by name.

Torch writes every graph it compiles to its structured log, `torch.__trace`, as long as that log has a handler.
"""

from __future__ import annotations

import logging
import re
from collections import Counter

from stepscope.workloads.workload import CAPTURED, LOWERED

# As captured from Python, and as passed to the compiler's backend after autograd and decompositions.
CAPTURED_GRAPH = "dynamo_output_graph"
LOWERED_GRAPHS = ("aot_forward_graph", "aot_backward_graph", "aot_inference_graph")
_LOWERED_OP = re.compile(r"torch\.ops\.(\w+)\.(\w+)")
_CAPTURED_CALL = re.compile(r"[\w\])]\.(\w+)\(")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)  # the Python line a call comes from, which contains calls too
_WITH_MASK = re.compile(r"\.scaled_dot_product_attention\([^;\n]*attn_mask = (?!None)")


class CompiledGraphs(logging.Handler):
    """`ops`: op name → occurrences in graphs compiled between `start()` and `stop()`."""

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
    """Return the calls in a captured graph as ops; attention with a mask is also counted as `attn_mask`.

    >>> dict(captured_ops("# code: y = x.softmax(-1).sum()\\ny = torch.softmax(x, dim = -1);  z = y.sum()"))
    {'captured aten::softmax': 1, 'captured aten::sum': 1}
    """
    graph = _COMMENT.sub("", graph)
    found = Counter(f"{CAPTURED}aten::{name}" for name in _CAPTURED_CALL.findall(graph))
    found.update(f"{CAPTURED}attn_mask" for _ in _WITH_MASK.findall(graph))
    return found


def lowered_ops(graph: str) -> Counter[str]:
    """Return the ops in a lowered graph.

    >>> dict(lowered_ops("mm: f32[4, 4] = torch.ops.aten.mm.default(a, b)"))
    {'lowered aten::mm': 1}
    """
    return Counter(f"{LOWERED}{namespace}::{name}" for namespace, name in _LOWERED_OP.findall(graph))
