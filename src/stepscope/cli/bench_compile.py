"""Check that torch.compile computes what eager code does, at two shapes, and say what it did on the way.

Each configuration is compiled in a fresh process and called at two shapes. Outputs, or the loss, and gradients are
held against eager code with the tolerances of stepscope bench. Then what the compiler did: graphs, graph breaks and
recompiles with their lines, dynamic sizes, caches, seconds by stage, steps until they are won back. What does not
compile is a row with the first useful line of the error.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.
Values separated by commas multiply. The exit code is 0 when all is well, 3 when something differs or does not
compile, 2 for a mistake.

examples:
  stepscope bench --check compile cs336 --preset tiny --device cpu
  stepscope bench --check compile model.py:build --compile default,reduce-overhead --shapes batch=4,6
  stepscope bench --check compile hf:config.json --mode inference --shapes seq_len=128,96 --json
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.numbers import positive
from stepscope.cli.support.output import print_document
from stepscope.cli.support.points import add_point_arguments, find_workload, typed_axes
from stepscope.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from stepscope.sweep.grid import Grid, Point
    from stepscope.workloads.workload import Workload

FLAGS = ("mode", "dtype", "compile", "sdpa", "seed", "device")
EXIT_NOT_WELL = 3
NUM_LOG_LINES = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    add_point_arguments(parser, "what to compile", FLAGS)
    parser.add_argument(
        "--shapes", metavar="KEY=V1,V2", help="the shapes (default: seq_len, else batch, and half of it)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="kill a check after (default 600)")
    parser.add_argument("--top", type=positive, default=8, metavar="N", help="rows in lists (default 8)")
    parser.add_argument("--json", action="store_true", help="one JSON object (docs/compile.md)")


def main(arguments: argparse.Namespace) -> int:
    """Check and print; 0 when all compiled configurations compute what eager ones do."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch")
    from stepscope.cli.bench import default_device
    from stepscope.document.compile_check import check_json, checks_document
    from stepscope.sweep.grid import Grid

    if not 0 < arguments.timeout < math.inf:
        raise UsageError(f"--timeout {arguments.timeout:g}: must be more than 0, and an end")
    workload = find_workload(arguments)
    defaults: dict[str, Any] = {"mode": "forward+backward", "compile": "default", "steps": 5}
    if arguments.device is None:
        defaults["device"] = default_device()
    grid = Grid(workload, defaults)
    points = grid.points([typed_axes(grid, arguments, FLAGS)])
    asked = _shapes(grid, arguments.shapes)
    rows = _run(workload, points, asked, arguments.timeout)
    print_document(
        lambda: checks_document(rows),
        lambda: {"checks": [check_json(row) for row in rows]},
        arguments.json,
        arguments.top,
    )
    return 0 if all(row["status"] == "ok" for row in rows) else EXIT_NOT_WELL


def _shapes(grid: Grid, text: str | None) -> tuple[str, list[int]] | None:
    """The knob and the values that were asked for."""
    if text is None:
        return None
    key, equals, _ = text.partition("=")
    if not equals:
        raise UsageError(f"--shapes {text}: write key=v1,v2")
    (name, values), *others = grid.words([text]).items()
    if others or len(values) < 2:
        raise UsageError(f"--shapes {text}: two values or more of one knob")
    for value in values:
        grid.points([{name: [value]}])  # an unknown knob, or a value it cannot have, is a mistake
    try:
        return name, [int(value) for value in values]
    except ValueError:
        raise UsageError(f"--shapes {text}: {key} must be whole numbers") from None


def shapes_of(point: Point, asked: tuple[str, list[int]] | None) -> list[dict[str, Any]]:
    """Knobs of each shape: as asked for, else a length and half of it, else a batch and half of it, else none."""
    if asked is not None:
        return [{asked[0]: value} for value in asked[1]]
    for name in ("seq_len", "batch"):
        value = point.config.get(name)
        if isinstance(value, int) and value > 3:  # sizes of 1 and 0 are compiled for themselves alone
            return [{name: value}, {name: value // 2}]
    return [{}]


def _run(
    workload: Workload[Any], points: list[Point], asked: tuple[str, list[int]] | None, timeout_s: float
) -> list[dict[str, Any]]:
    from stepscope.cli.support.progress import Progress
    from stepscope.formatting import plural
    from stepscope.recorder.origin import now
    from stepscope.sweep.point_process import Request
    from stepscope.sweep.rows import row_of
    from stepscope.sweep.server import Server, default_start

    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="stepscope-") as folder,
        Server(default_start()) as server,
        Progress(plural(len(points), "check"), silent_s=0.0) as progress,
    ):
        for num_done, point in enumerate(points):
            progress(num_done / len(points))
            log = Path(folder) / f"{point.hash}.txt"
            request = Request(
                workload=point.workload,
                preset=point.preset,
                config=dict(point.config),
                run=dict(point.run),
                result_path=str(Path(folder) / f"{point.hash}.json"),
                log_path=str(log),
                timeout_s=timeout_s,
                shapes=shapes_of(point, asked),
            )
            started_at = now()
            row = row_of(point, request, server.run(request), started_at)
            if row["status"] != "ok" and log.is_file():
                row["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]
            rows.append(row)
    return rows
