"""Run a workload in each dtype and say what it costs and gains: time, memory, exactness, and which work made it so.

Each dtype runs in a process of its own, as a point of stepscope bench: time by phase, memory by owner at the peak,
how far loss and gradients are from fp32 with the same weights and batch, and where the time went, casts apart. A
dtype that this device cannot do is a row with the reason.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.

examples:
  stepscope bench --check precision cs336 --preset tiny --device cpu
  stepscope bench --check precision cs336 --preset small --dtype fp32,tf32,autocast_bf16 -o runs/precision
  stepscope bench --check precision hf:config.json --mode forward+backward
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.points import add_point_arguments, find_workload, typed_axes
from stepscope.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from stepscope.cli.bench import Answer

FLAGS = ("mode", "dtype", "sdpa", "optimizer", "warmup", "steps", "seed", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    add_point_arguments(parser, "what to run", FLAGS)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="kill a point after (default 600)")
    parser.add_argument("--start", choices=("fork", "spawn"), help="how points' processes start (default: fork)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the sweep's folder (default: runs/…)")
    parser.add_argument("--resume", action="store_true", help="go on with a sweep that was interrupted")
    parser.add_argument("--json", action="store_true", help="one JSON object (docs/precision.md)")
    parser.add_argument("--quiet", action="store_true", help="no lines while it runs")


def main(arguments: argparse.Namespace) -> int:
    """Run the dtypes; 0 when each is ok, or impossible here."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch")
    from stepscope.cli.bench import check_timeout, default_device, fill_closed_streams, run_sweep
    from stepscope.sweep.grid import Grid, renamed
    from stepscope.sweep.run_knobs import DTYPES
    from stepscope.sweep.runner import Options

    fill_closed_streams()
    check_timeout(arguments.timeout)
    workload = find_workload(arguments)
    grid = Grid(workload, {"device": default_device()} if arguments.device is None else {})
    axes = {"dtype": list(DTYPES), **typed_axes(grid, arguments, FLAGS)}
    points = [renamed(point, {"compares": "dtypes"}) for point in grid.points([axes])]
    if not points:
        raise UsageError("there is no point to run: a knob is without values")
    options = Options(timeout_s=arguments.timeout, compares_dtypes=True)
    return run_sweep(workload, points, options, arguments, verb="precision", answer=_answer, fine=("ok", "skipped"))


def _answer(rows: list[dict[str, Any]], environments: dict[str, Any]) -> Answer:
    from stepscope.analysis.precision.dtype_comparison import compare_dtypes
    from stepscope.document.dtype_comparison import dtypes_document

    found = compare_dtypes(rows, environments)

    def to_json() -> dict[str, Any]:
        listed = [one.to_json() for one in found]
        return {**listed[0], "comparisons": listed} if listed else {"comparisons": []}

    return lambda: dtypes_document(found), to_json
