"""Check that torch.compile computes what eager code does, at two shapes, and show what the compiler did.

Each configuration is compiled in a fresh process and called at two shapes. Outputs (or the loss) and gradients are
compared with eager code, with the tolerances of stepscope bench. The report shows graphs, graph breaks and recompiles
with their lines, dynamic sizes, caches, seconds by stage, and how many steps recover them. What does not compile is a
row with the first useful line of the error.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.
Values separated by commas multiply. The exit code is 0 if all results agree, 3 if something differs or does not
compile, 2 for a usage error.

examples:
  stepscope bench --check compile cs336 --preset tiny --device cpu
  stepscope bench --check compile model.py:build --compile default,reduce-overhead --shapes batch=4,6
  stepscope bench --check compile hf:config.json --mode inference --shapes seq_len=128,96 --json
"""

from __future__ import annotations

import argparse

from stepscope.cli.support.numbers import positive, seconds
from stepscope.cli.support.output import print_document
from stepscope.cli.support.points import add_point_arguments, typed_axes
from stepscope.errors import need_torch

FLAGS = ("mode", "dtype", "compile", "sdpa", "seed", "device")
EXIT_NOT_SAME = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    add_point_arguments(parser, "what to compile", FLAGS)
    parser.add_argument("--shapes", metavar="KEY=V1,V2", help="shapes (default: seq_len or batch, and half of it)")
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="time limit per check (default 600)"
    )
    parser.add_argument("--top", type=positive, default=8, metavar="N", help="rows in lists (default 8)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text (docs/compile.md)")


def main(arguments: argparse.Namespace) -> int:
    """Check and print; 0 if all compiled configurations compute what eager ones do."""
    need_torch()
    from stepscope.api.axes import axes_of
    from stepscope.cli.support.progress import Progress
    from stepscope.document.compile_check import check_json, checks_document
    from stepscope.formatting import plural
    from stepscope.sweep.checks.compile_runs import check_compile, parse_shapes
    from stepscope.sweep.run import find_workload, grid_points

    workload = find_workload(arguments.workload)
    axes = axes_of(None, typed_axes(arguments, FLAGS))
    points = grid_points(workload, axes, mode="forward+backward", compile="default", steps=5)
    shapes = None if arguments.shapes is None else parse_shapes(workload, arguments.shapes)
    with Progress(plural(len(points), "check"), silent_s=0.0) as progress:
        rows = check_compile(points, shapes, arguments.timeout, progress)
    print_document(
        lambda: checks_document(rows),
        lambda: {"checks": [check_json(row) for row in rows]},
        arguments.json,
        arguments.top,
    )
    return 0 if all(row["status"] == "ok" for row in rows) else EXIT_NOT_SAME
