"""Proof that the run knobs took effect: compiler, attention backend, fused optimizer."""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from stepscope.formatting import plural
from stepscope.sweep.run_knobs import has_cuda_graphs
from stepscope.workloads.ops.attention import math_attention_ran
from stepscope.workloads.workload import CAPTURED, LOWERED, Evidence, Proof, Value, ran

ATTENTION_OPS = {
    # This also matches the CPU's flash attention, whose op has a longer name.
    "flash": ("_scaled_dot_product_flash_attention",),
    "efficient": ("_scaled_dot_product_efficient_attention",),
    "cudnn": ("_scaled_dot_product_cudnn_attention",),
}
# As captured from Python, and as passed to the compiler's backend after autograd and decompositions.
CAPTURED_GRAPH = "dynamo_output_graph"
LOWERED_GRAPHS = ("aot_forward_graph", "aot_backward_graph", "aot_inference_graph")
_LOWERED_OP = re.compile(r"torch\.ops\.(\w+)\.(\w+)")
_CAPTURED_CALL = re.compile(r"[\w\])]\.(\w+)\(")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)  # the Python line a call comes from, which contains calls too
_WITH_MASK = re.compile(r"\.scaled_dot_product_attention\([^;\n]*attn_mask = (?!None)")


def run_proofs(run: Mapping[str, Value]) -> list[Proof]:
    """Return the claims that the run knobs make."""
    proofs = []
    if run["compile"] != "off":
        proofs.append(Proof(claim=f"compile={run['compile']}", shows=partial(_compiled, run)))
    if run["sdpa"] == "math":
        proofs.append(Proof(claim="sdpa=math", shows=math_attention_ran))
    elif run["sdpa"] != "free":
        proofs.append(ran(f"sdpa={run['sdpa']}", *ATTENTION_OPS[str(run["sdpa"])]))
    if run["optimizer"] == "fused" and run["mode"] == "step":
        proofs.append(ran("optimizer=fused", "_fused_adamw"))
    return proofs


def compiler_facts(probe: Any, counters: Mapping[str, float]) -> dict[str, float]:
    """Return what the compiler did, as numbers by name, for the row and the evidence."""
    report = probe.report()
    graphs = report["cuda_graphs"] or {}
    return {
        "compiler.num_graphs": counters.get("dynamo.unique_graphs", 0.0),
        "compiler.num_graph_breaks": float(sum(entry["count"] for entry in report["graph_breaks"])),
        "compiler.num_recompiles": float(len(report["recompiles"])),
        "compiler.num_recompile_limit_hits": float(sum(e["count"] for e in report["recompile_limit_hits"])),
        "compiler.num_failures": float(sum(entry["count"] for entry in report["failures"])),
        "compiler.num_cuda_graphs": float(graphs.get("num_recorded", 0)),
        "compiler.num_cuda_graph_skips": counters.get("dynamo.inductor.cudagraph_skips", 0.0),
    }


def compiler_notes(probe: Any, run: Mapping[str, Value]) -> list[str]:
    """Return notes on a compiled row: what ran uncompiled and why, and where CUDA graphs keep memory."""
    report = probe.report()
    notes = [
        f"torch could not compile a part, which ran uncompiled: {entry['reason']}" for entry in report["failures"]
    ]
    notes += [f"recompile limit reached: {entry['frame']} ran uncompiled" for entry in report["recompile_limit_hits"]]
    if has_cuda_graphs(run):
        notes.append("CUDA graphs keep tensors in pools that allocated bytes do not include: see reserved bytes")
    return notes


def _compiled(run: Mapping[str, Value], evidence: Evidence) -> str | None:
    facts = evidence.facts
    graphs = facts.get("compiler.num_graphs", 0)
    fell_back = facts.get("compiler.num_recompile_limit_hits", 0) + facts.get("compiler.num_failures", 0)
    # A replayed CUDA graph shows up as its own launch; torch's counter differs between versions.
    launches = sum(count for name, count in evidence.ops.items() if "GraphLaunch" in name)
    if not graphs or fell_back or (has_cuda_graphs(run) and not launches):
        return None
    return plural(graphs, "graph") + (f", {launches} CUDA graph launches" if has_cuda_graphs(run) else "")


class CompiledGraphs(logging.Handler):
    """`ops`: op name → occurrences in graphs compiled between `start()` and `stop()`.

    Compiled code does not call ops by name. Torch writes every graph it compiles to its structured log,
    `torch.__trace`, as long as that log has a handler.
    """

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
