"""Show the dtype of everything in a step: what is cast, and what stays in float32 and why.

One forward and backward, and one optimizer step for its state: parameters, each module's inputs and outputs, each op,
logits, loss, gradients, optimizer state; every cast with the bytes it moves, who asked for it and where.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.

examples:
  stepscope bench --check dtypes examples/toy_precision.py:build --dtype autocast_bf16
  stepscope bench --check dtypes cs336 --preset tiny --dtype autocast_bf16 --micro-batches 2
  stepscope bench --check dtypes hf:config.json --dtype bf16 --json
"""

import argparse
import warnings

from stepscope.cli.support.options import add_point_arguments, positive, typed_points
from stepscope.cli.support.output import print_answer
from stepscope.errors import UsageError, need_torch

FLAGS = ("mode", "dtype", "sdpa", "optimizer", "seed", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_point_arguments(parser, "what to audit", FLAGS)
    parser.add_argument("--micro-batches", type=positive, default=1, metavar="N", help="micro-batches (default 1)")
    parser.add_argument("--rows", type=positive, default=12, metavar="N", help="rows of a table (default 12)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text (docs/precision.md)")


def main(arguments: argparse.Namespace) -> int:
    need_torch()
    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.sweep.checks.precision_probe import audit_point
    from stepscope.workloads.users_code import users_code

    workload, points = typed_points(arguments, FLAGS)
    if len(points) != 1:
        raise UsageError(f"an audit takes one point, not {len(points)}: name one value per knob")
    with users_code(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own warnings are not part of the answer
        audit = DtypeAudit(audit_point(workload, points[0], arguments.micro_batches))
    print_answer(audit, arguments.json, arguments.rows)
    return 0
