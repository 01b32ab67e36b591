"""Say in which dtype everything of a model computes, what is cast on the way, and what stayed in float32 and why.

One forward and backward, and one optimizer step for its state: parameters, each module's inputs and outputs, each op,
logits, loss, gradients, optimizer state; every cast with the bytes it moves, who asked for it and where.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.

examples:
  stepscope bench --check dtypes examples/toy_precision.py:build --dtype autocast_bf16
  stepscope bench --check dtypes cs336 --preset tiny --dtype autocast_bf16 --micro-batches 2
  stepscope bench --check dtypes hf:config.json --dtype bf16 --json
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings

from stepscope.cli.support.output import print_document
from stepscope.cli.support.points import add_point_arguments, find_workload, typed_axes
from stepscope.cli.support.users_code import users_code
from stepscope.errors import MissingDependencyError, UsageError

FLAGS = ("mode", "dtype", "sdpa", "optimizer", "seed", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    add_point_arguments(parser, "what to audit", FLAGS)
    parser.add_argument(
        "--micro-batches", type=int, default=1, metavar="N", help="forwards and backwards (default 1)"
    )
    parser.add_argument("--rows", type=int, default=12, metavar="N", help="rows of a table (default 12)")
    parser.add_argument("--json", action="store_true", help="one JSON object (docs/precision.md)")


def main(arguments: argparse.Namespace) -> int:
    """Audit and print."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch")
    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.cli.bench import default_device
    from stepscope.document.audit import audit_document
    from stepscope.sweep.checks.audit import audit_point
    from stepscope.sweep.grid import Grid

    for name in ("micro_batches", "rows"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: 1 or more")
    workload = find_workload(arguments)
    grid = Grid(workload, {"device": default_device()} if arguments.device is None else {})
    points = grid.points([typed_axes(grid, arguments, FLAGS)])
    if len(points) != 1:
        raise UsageError(f"an audit is of one point, these are {len(points)}: one value for each knob")
    with users_code(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model's own ops: they are no part of the answer
        audit = DtypeAudit(audit_point(workload, points[0], arguments.micro_batches))
    print_document(lambda: audit_document(audit, arguments.rows), audit.to_json, arguments.json)
    return 0
