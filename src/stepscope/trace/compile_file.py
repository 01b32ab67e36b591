"""`compile.json` of a recording, and `compiler` of a checked workload: torch.compile's reports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from stepscope.border import COUNT, FLAG, NUMBER, PLAIN, TEXT, fields_that_fit, read_json

COMPILE_FILE = "compile.json"


class CompileFacts(TypedDict, total=False):
    """`compile.json`. Older recordings have some of the fields."""

    num_compiles: int
    compile_seconds: float  # of all compiles, including backwards
    seconds_by_stage: dict[str, float]
    """`dynamo` (tracing Python), `autograd` (AOT: the backward's graph, and partitioning), `inductor` (lowering,
    fusing, code generation), `kernels` (waiting for Triton or the C++ compiler), each without the next; they add up
    to `compile_seconds`. A stage that this torch does not report is part of the one before.
    """
    frames: list[dict[str, Any]]  # compiled function (`frame`) and `num_compiles`
    regions: dict[str, str]  # compile id as in traces, `0/1`, → its function
    num_graphs: int
    graphs: list[dict[str, Any]]  # `compile_id`, `frame`, `num_ops`, `num_inputs`, `num_guards`
    graph_breaks: list[dict[str, Any]]
    """`reason`, `place` in the user's code, `count`; `runs_eagerly` if torch stopped compiling the function."""
    recompiles: list[dict[str, Any]]
    """`frame`, `failed_guards` in torch's words, and the `place` of the first (not with torch 2.6)."""
    recompile_limit_hits: list[dict[str, Any]]
    """`frame` that reached the limit and runs eagerly from then on, `count`."""
    dynamic_dimensions: list[dict[str, Any]]
    """Sizes compiled for any value: `source`, `symbol`, `sizes` seen when compiling, `place`."""
    caches: dict[str, dict[str, int]]
    """Of compiled `graphs` and the `autograd` stage: number of `hit`, `miss` and `bypass`."""
    cuda_graph_skips: list[dict[str, Any]]  # `reason` and `count`
    cuda_graphs: dict[str, int] | None
    """`num_recorded`, `num_compiled_functions`, and the largest `num_distinct_sizes` of one function."""
    failures: list[dict[str, Any]]  # `reason`, `count`, and `place` if torch reports it
    compiled_calls: list[dict[str, Any]]
    """Of each compiled graph: `compile_id`, `key` (the profiler's name for a call of it), `is_backward`, and `calls`:
    kernels and library ops in order, each with its module (`""` for the compiled one itself, null if unknown)."""


_REASON = {"reason": TEXT, "place~": TEXT, "count~": COUNT, "runs_eagerly~": FLAG, "frame~": TEXT}
SCHEMA: dict[str, Any] = {
    "num_compiles": COUNT,
    "num_graphs": COUNT,
    "compile_seconds": NUMBER,
    "seconds_by_stage": {"*": NUMBER},
    "frames": [{"frame": TEXT, "num_compiles": COUNT}],
    "regions": {"*": TEXT},
    "graphs": [{"compile_id~": TEXT, "frame~": TEXT, "num_ops~": COUNT, "num_inputs~": COUNT, "num_guards~": COUNT}],
    "graph_breaks": [_REASON],
    "cuda_graph_skips": [_REASON],
    "failures": [_REASON],
    "recompile_limit_hits": [{"frame": TEXT, "count": COUNT}],
    "recompiles": [{"frame": TEXT, "failed_guards": [TEXT], "place~": TEXT}],
    "dynamic_dimensions": [{"source": TEXT, "symbol~": TEXT, "sizes~": [PLAIN], "place~": TEXT}],
    "caches": {"*": {"*": COUNT}},
    "cuda_graphs~": {"num_recorded": COUNT, "num_distinct_sizes": COUNT, "*": COUNT},
    "compiled_calls": [{"compile_id~": TEXT, "key~": TEXT, "is_backward~": FLAG, "calls": [[PLAIN]]}],
}
"""What the fields must be. One that is not is left out, as in an older recording."""


def entries(report: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list in `compile.json`; an empty one if it is absent."""
    return report.get(name) or []


def count_of(entry: Mapping[str, Any]) -> int:
    return int(entry.get("count") or 1)


def read_compile_file(path: Path, warnings: list[str]) -> Mapping[str, Any] | None:
    """Return what fits of `compile.json`; None, with a warning, if it is not one."""
    try:
        report = read_json(path)
        if not isinstance(report, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError):
        warnings.append(f"{path.name} could not be read and was skipped")
        return None
    return fields_that_fit(report, SCHEMA, path.name, warnings)


def compile_file_of_trace(trace: Path) -> Mapping[str, Any] | None:
    """Return `compile.json` of the recording of a trace (`<run>/trace/rank0.json.gz`); None for other traces."""
    run = trace.parent.parent
    is_of_recording = trace.parent.name == "trace" and (run / COMPILE_FILE).is_file()
    return read_compile_file(run / COMPILE_FILE, []) if is_of_recording else None  # the recording's reader warns
