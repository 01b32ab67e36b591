"""Run a workload in each dtype and compare time, memory and exactness.

Each dtype runs in a process of its own, like a point of stepscope bench: time by phase, memory by owner at the peak,
how far loss and gradients are from fp32 with the same weights and batch, and where the time went, casts apart. A
dtype that this device does not support is a row with the reason.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.

examples:
  stepscope bench --check precision cs336 --preset tiny --device cpu
  stepscope bench --check precision cs336 --preset small --dtype fp32,tf32,autocast_bf16 -o runs/precision
  stepscope bench --check precision hf:config.json --mode forward+backward
"""

import argparse
from typing import TYPE_CHECKING, Any

from stepscope.cli.bench import run_and_print
from stepscope.cli.support.options import add_point_arguments, add_sweep_arguments, typed_axes
from stepscope.cli.support.output import fill_closed_streams
from stepscope.errors import need_torch

if TYPE_CHECKING:
    from stepscope.cli.bench import Answer
    from stepscope.sweep.results import Results

FLAGS = ("mode", "dtype", "sdpa", "optimizer", "warmup", "steps", "seed", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_point_arguments(parser, "what to run", FLAGS)
    add_sweep_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    need_torch()
    from stepscope.sweep.grid import find_workload, grid_points, renamed
    from stepscope.sweep.run_knobs import DTYPES
    from stepscope.sweep.runner import Options

    fill_closed_streams()
    workload = find_workload(arguments.workload)
    axes = {"dtype": list(DTYPES), **typed_axes(arguments, FLAGS)}
    points = [renamed(point, {"compares": "dtypes"}) for point in grid_points(workload, axes)]
    options = Options(timeout_s=arguments.timeout, compares_dtypes=True)
    return run_and_print(workload, points, options, arguments, "precision", _answer, fine=("ok", "skipped"))


def _answer(results: "Results") -> "Answer":
    from stepscope.analysis.precision.dtype_comparison import compare_dtypes
    from stepscope.document.precision import dtypes_document

    found = compare_dtypes(results.rows, results.facts["environments"])

    def to_json() -> dict[str, Any]:
        listed = [one.to_json() for one in found]
        return {**listed[0], "comparisons": listed} if listed else {"comparisons": []}

    return lambda: dtypes_document(found), to_json
