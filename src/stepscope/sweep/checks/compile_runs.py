"""Runs compile checks: every point in a process of its own, called at several shapes."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.rows import Row
from stepscope.sweep.grid import Grid, Point
from stepscope.sweep.protocol import OK
from stepscope.sweep.results import text_of
from stepscope.sweep.runner import measured_row
from stepscope.sweep.server import Server, default_start
from stepscope.workloads.workload import Workload

Shapes = tuple[str, list[int]]  # a knob and the values that it takes
NUM_LOG_LINES = 200


def parse_shapes(workload: Workload[Any], text: str) -> Shapes:
    """Return the knob and values of `key=v1,v2`; UsageError for a knob or a value that does not exist."""
    if "=" not in text:
        raise UsageError(f"--shapes {text}: write key=v1,v2")
    (name, values), *others = Grid.words([text]).items()
    if others or len(values) < 2:
        raise UsageError(f"--shapes {text}: name two or more values of one knob")
    points = Grid(workload, {}).points([{name: values}])
    found = [point.config.get(name) for point in points]
    if not all(isinstance(value, int) for value in found):
        raise UsageError(f"--shapes {text}: {name} must be a knob of the workload with integer values")
    return name, [int(value) for value in values]


def shapes_of(point: Point, asked: Shapes | None) -> list[dict[str, Any]]:
    """Return the knobs of each shape: as asked, else a length and half of it, else a batch and half of it."""
    if asked is not None:
        return [{asked[0]: value} for value in asked[1]]
    for name in ("seq_len", "batch"):
        value = point.config.get(name)
        if isinstance(value, int) and value > 3:  # sizes 0 and 1 are always compiled separately
            return [{name: value}, {name: value // 2}]
    return [{}]


def check_compile(
    points: Sequence[Point], asked: Shapes | None, timeout_s: float, progress: Callable[[float], None]
) -> list[Row]:
    """Return the row of every point; a failed one has the end of its log."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder, Server(default_start()) as server:
        for num_done, point in enumerate(points):
            progress(num_done / len(points))
            log = Path(folder) / f"{point.hash}.txt"
            row = measured_row(point, server, Path(folder), log, timeout_s=timeout_s, shapes=shapes_of(point, asked))
            if row["status"] != OK and log.is_file():
                row["log"] = text_of(log).splitlines()[-NUM_LOG_LINES:]
            rows.append(row)
    return rows
