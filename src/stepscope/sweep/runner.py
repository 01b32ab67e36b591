"""Runs points one after another and writes each row as soon as it is complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.sweep.grid import Point
from stepscope.sweep.protocol import Row
from stepscope.sweep.results import LOG_FOLDER, TRACE_FOLDER, Results
from stepscope.sweep.rows import measured_row
from stepscope.sweep.run_knobs import has_backward, without_autotuning
from stepscope.sweep.server import Server
from stepscope.workloads.workload import Workload

# Run knobs that the gate's verdict does not depend on.
IGNORED_BY_GATE = ("warmup", "steps", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How every point of a sweep is run."""

    timeout_s: float = 600.0
    trace: bool = False
    memory_limit_bytes: int | None = None
    compares_dtypes: bool = False
    layers: bool = False


class Runner:
    """`run(point)` returns the point's row; each point runs in its own process."""

    def __init__(self, workload: Workload[Any], server: Server, results: Results, options: Options) -> None:
        self._gate_sizes = workload.gate
        self._server = server
        self._folder = results.folder.absolute()
        self.options = options
        self._gates: dict[str, dict[str, Any]] = {}

    def run(self, point: Point, probe: bool = False) -> Row:
        """Run a point and return its row without writing it."""
        key, options = self._gate_key(point), self.options
        trace = self._folder / TRACE_FOLDER / f"{point.hash}.json.gz"
        row = measured_row(
            point,
            self._server,
            self._folder,
            self._folder / LOG_FOLDER / f"{point.hash}.txt",
            trace_path=str(trace) if options.trace and not probe else None,
            memory_limit_bytes=options.memory_limit_bytes,
            known_gate=self._gates.get(key),
            probe=probe,
            timeout_s=options.timeout_s,
            compares_dtypes=options.compares_dtypes and not probe,
            layers=options.layers and not probe,
        )
        gate = row.get("gate")
        if gate is not None:
            self._gates.setdefault(key, {**gate, "run_by": point.hash})
        return row

    def _gate_key(self, point: Point) -> str:
        """Return a key that is equal for points that look the same to the gate, which has its own sizes."""
        config = {name: value for name, value in point.config.items() if name not in self._gate_sizes}
        run = {name: value for name, value in without_autotuning(point.run).items() if name not in IGNORED_BY_GATE}
        if point.run["mode"] == "step" and point.run["optimizer"] in ("fused", "handwritten"):
            run["optimizer"] = point.run["optimizer"]  # the gate compares these with AdamW
        run["mode"] = has_backward(point.run)
        return hashlib.sha256(json.dumps([config, run], sort_keys=True).encode()).hexdigest()


def run_points(
    points: Sequence[Point],
    results: Results,
    run: Callable[[Point], Row],
    on_row: Callable[[Row, int], None] = lambda row, num_done: None,
) -> None:
    """Run the points without a row; `on_row` receives each row as it is written and the number of finished points."""
    done = results.hashes
    num_done = sum(point.hash in done for point in points)
    for point in points:
        if point.hash in done:
            continue
        row = run(point)
        results.append(row)
        num_done += 1
        on_row(row, num_done)
