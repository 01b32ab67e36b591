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

import argparse

from stepscope.cli.support.options import add_point_arguments, positive, seconds, typed_points
from stepscope.cli.support.output import Progress, print_document
from stepscope.errors import need_torch
from stepscope.formatting import plural

FLAGS = ("mode", "dtype", "compile", "sdpa", "seed", "device")
EXIT_NOT_SAME = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_point_arguments(parser, "what to compile", FLAGS)
    add = parser.add_argument
    add("--shapes", metavar="KEY=V1,V2", help="shapes (default: seq_len or batch, and half of it)")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="time limit per check (default 600)")
    add("--top", type=positive, default=8, metavar="N", help="rows in lists (default 8)")
    add("--json", action="store_true", help="print JSON instead of text (docs/compile.md)")


def main(arguments: argparse.Namespace) -> int:
    need_torch()
    from stepscope.document.sections.compiler import check_json, checks_document
    from stepscope.sweep.checks.compile_runs import check_compile, parse_shapes

    workload, points = typed_points(arguments, FLAGS, mode="forward+backward", compile="default", steps=5)
    shapes = None if arguments.shapes is None else parse_shapes(workload, arguments.shapes)
    with Progress(plural(len(points), "check"), silent_s=0.0) as progress:
        rows = check_compile(points, shapes, arguments.timeout, progress)

    def to_json() -> object:
        return {"checks": [check_json(row) for row in rows]}

    print_document(lambda: checks_document(rows), to_json, arguments.json, arguments.top)
    return 0 if all(row["status"] == "ok" for row in rows) else EXIT_NOT_SAME
