"""`compile.json` of a recording, and `compiler` of a checked workload: what torch.compile said of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

COMPILE_FILE = "compile.json"


class CompileFacts(TypedDict, total=False):
    """`compile.json`. Recordings of older versions have some of the fields, and a damaged one may have anything."""

    num_compiles: int
    compile_seconds: float
    """Of all compiles, backwards too."""
    seconds_by_stage: dict[str, float]
    """`dynamo` (reading Python), `autograd` (AOT: the backward's graph, and splitting), `inductor` (lowering, fusing,
    writing code), `kernels` (waiting for Triton or the C++ compiler). Each without the next; together
    `compile_seconds`. A stage that this torch does not tell is absent and part of the one before it."""
    frames: list[dict[str, Any]]
    """Function that was compiled (`frame`) and `num_compiles`."""
    regions: dict[str, str]
    """Number of a compile as traces have it, `0/1`, → its function."""
    num_graphs: int
    graphs: list[dict[str, Any]]
    """`compile_id`, `frame`, `num_ops`, `num_inputs`, `num_guards`."""
    graph_breaks: list[dict[str, Any]]
    """`reason`, `place` in the user's code, `count`; `runs_eagerly` where torch gave the function up."""
    recompiles: list[dict[str, Any]]
    """`frame`, `failed_guards` as torch words them, and the `place` of the first, which torch 2.6 does not tell."""
    recompile_limit_hits: list[dict[str, Any]]
    """`frame` that was compiled too often and runs eagerly from then on, `count`."""
    dynamic_dimensions: list[dict[str, Any]]
    """Sizes that were compiled for any value: `source`, `symbol`, `sizes` seen when compiling, `place`."""
    caches: dict[str, dict[str, int]]
    """Of compiled `graphs` and of the `autograd` stage: how often `hit`, `miss` and `bypass` were told."""
    cuda_graph_skips: list[dict[str, Any]]
    """`reason` and `count`."""
    cuda_graphs: dict[str, int] | None
    """`num_recorded`, `num_compiled_functions`, `num_distinct_sizes` of one function at most."""
    failures: list[dict[str, Any]]
    """`reason`, `count`, `place` where torch tells it."""
    compiled_calls: list[dict[str, Any]]
    """Of each compiled graph: `compile_id`, `key` (as the profiler names a call of it), `is_backward`, and `calls`:
    kernels and library ops in order, each with the module it computes, `""` for the compiled one itself, null where
    that is not known."""


def entries(report: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of `compile.json`, of which a damaged file may have made anything."""
    found = report.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def count_of(entry: Mapping[str, Any]) -> int:
    """How often an entry was seen."""
    count = entry.get("count", 1)
    return count if isinstance(count, int) else 1


def read_compile_file(path: Path) -> Mapping[str, Any] | None:
    """What the file says; None where it cannot be read."""
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


def compile_file_of_trace(trace: Path) -> Mapping[str, Any] | None:
    """The same of the recording whose trace this is, `<run>/trace/rank0.json.gz`; None for any other trace."""
    run = trace.parent.parent
    is_of_recording = trace.parent.name == "trace" and (run / COMPILE_FILE).is_file()
    return read_compile_file(run / COMPILE_FILE) if is_of_recording else None
