"""What Holistic Trace Analysis says of traces, as JSON: an oracle for the tests.

    python tests/analysis/hta_oracle.py TRACE_OR_FOLDER... [--round] [--last-step keep drop] [--tables NAME...]

Run it with an interpreter that has HTA (`pip install traceinsight 'pandas<3'`). Without `--round` HTA's own option
that leaves nanosecond times unrounded is on. HTA leaves out the last `ProfilerStep` unless told to keep it; it is
read once and asked for each. An answer that HTA could not give is its exception as text.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TABLES = ("num_gpu_events", "temporal", "kernel_tables", "overlap", "idle", "launches", "memory_bandwidth")
ALL_KERNELS = 10**9
"""HTA folds kernels after the tenth into one row called "others" unless it is asked for more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--round", action="store_true", help="whole microseconds, as HTA does by default")
    parser.add_argument("--last-step", nargs="+", choices=["keep", "drop"], default=["keep"])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        answers = {
            str(path): ask(path, arguments.round, arguments.last_step, arguments.tables) for path in arguments.paths
        }
    json.dump(answers, sys.stdout, indent=1)


def ask(path: Path, rounded: bool, last_step: list[str], tables: list[str]) -> dict[str, Any]:
    """HTA's tables of one trace (or one folder of ranks), per treatment of the last step."""
    from hta.common.trace import Trace
    from hta.configs.env_options import HTAEnvOptions

    HTAEnvOptions.instance().set_disable_ns_rounding(not rounded)
    began = time.perf_counter()
    try:
        trace = Trace(None, str(path)) if path.is_dir() else Trace({0: str(path)}, str(path.parent))
        trace.parse_traces(use_multiprocessing=False)
    except Exception as error:
        return {"error": _text(error)}
    read_s = time.perf_counter() - began
    return {"read_s": round(read_s, 3)} | {choice: _tables(trace, choice == "keep", tables) for choice in last_step}


def _tables(parsed: Any, keep_last_step: bool, names: list[str]) -> dict[str, Any]:
    from hta.trace_analysis import TraceAnalysis

    trace = copy.copy(parsed)
    trace.traces = {rank: table.copy() for rank, table in parsed.traces.items()}
    try:
        trace.align_and_filter_trace(keep_last_step)
        for rank, table in trace.traces.items():
            trace.traces[rank] = table.set_index("index", drop=False).rename_axis(None)
    except Exception as error:
        return {"error": _text(error)}
    trace.is_parsed = True
    hta = TraceAnalysis.__new__(TraceAnalysis)  # its constructor would read the files again
    hta.t = trace
    ranks = list(trace.traces)
    answers: dict[str, Callable[[], Any]] = {
        "num_gpu_events": lambda: {rank: _num_gpu_events(trace, rank) for rank in ranks},
        "temporal": lambda: _rows(hta.get_temporal_breakdown(visualize=False)),
        "kernel_tables": lambda: _kernels(hta),
        "overlap": lambda: _rows(hta.get_comm_comp_overlap(visualize=False)),
        "idle": lambda: _rows(hta.get_idle_time_breakdown(ranks=ranks, visualize=False)[0]),
        "launches": lambda: {rank: _launches(hta, rank) for rank in ranks},
        "memory_bandwidth": lambda: _bandwidth(hta, ranks),
    }
    return {"ranks": ranks} | {name: _or_error(answers[name]) for name in names}


def _num_gpu_events(trace: Any, rank: int) -> int:
    return int(trace.traces[rank]["stream"].ne(-1).sum())


def _kernels(hta: Any) -> dict[str, Any]:
    types, kernels = hta.get_gpu_kernel_breakdown(visualize=False, duration_ratio=1.0, num_kernels=ALL_KERNELS)
    return {"by_type": _rows(types), "by_name": _rows(kernels)}


def _launches(hta: Any, rank: int) -> dict[str, float]:
    table = hta.get_cuda_kernel_launch_stats(ranks=[rank], visualize=False)[rank]
    sums = {name: float(table[name].sum()) for name in ("cpu_duration", "gpu_duration", "launch_delay")}
    return {"num_launches": len(table)} | sums


def _bandwidth(hta: Any, ranks: list[int]) -> list[dict[str, Any]]:
    table = hta.get_memory_bw_summary(ranks=ranks)
    if table is None:
        return []
    table.columns = [name for _, name in table.columns]
    return _rows(table.reset_index())


def _rows(table: Any) -> list[dict[str, Any]]:
    return json.loads(table.to_json(orient="records", double_precision=10))


def _or_error(answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except Exception as error:
        return {"error": _text(error)}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip()


if __name__ == "__main__":
    main()
