"""Run a grid of configurations and return a complete table, whatever fails on the way.

Each point runs in a process of its own: out of memory, a crash, a hang, a wrong result are rows of the table. Rows
are written as they finish; a sweep that is killed goes on with --resume. A variant is held against the workload's
reference before it is timed, and must prove that its path ran.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.
Values separated by commas multiply. The exit code is 0 when every row is ok, 1 when one is not, 2 for a mistake.

examples:
  stepscope bench cs336 --preset tiny --set seq_len=64,128 --set attention=naive,sdpa --device cpu
  stepscope bench cs336 --preset small,medium --mode forward,step --dtype bf16,tf32 -o runs/sizes
  stepscope bench attention --zip --set seq_len=1024,4096 --set batch=16,4
  stepscope bench train.py:build --set width=256,512 --dry-run
  stepscope bench hydra --preset 100m --max-batch 40GiB
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.output import print_document, tell
from stepscope.cli.support.points import RUN_FLAGS, add_point_arguments, find_workload, typed_axes
from stepscope.cli.support.users_code import users_code
from stepscope.errors import MissingDependencyError, UsageError
from stepscope.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.document.model import Document
    from stepscope.sweep.grid import Point
    from stepscope.sweep.runner import Options
    from stepscope.workloads.workload import Workload

    Answer = tuple[Callable[[], Document], Callable[[], Any]]
    """What is printed: as a document, and as JSON values."""

EXIT_NOT_ALL_OK = 1
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    add_point_arguments(parser, "what to run", RUN_FLAGS)
    parser.add_argument("--zip", action="store_true", help="pair the lists instead of multiplying them")
    parser.add_argument("--grid", metavar="FILE", help="points from file.toml or file.py:function")
    parser.add_argument("--max-batch", nargs="?", const="", metavar="MEMORY", help="find the largest batch that fits")
    parser.add_argument("--memory-limit", metavar="MEMORY", help="a point may have so much: 40GiB (default: all)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="kill a point after (default 600)")
    parser.add_argument("--trace", action="store_true", help="keep a trace of each point")
    parser.add_argument("--start", choices=("fork", "spawn"), help="how points' processes start (default: fork)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the sweep's folder (default: runs/…)")
    parser.add_argument("--resume", action="store_true", help="go on with a sweep that was interrupted")
    parser.add_argument("--dry-run", action="store_true", help="print the points and run nothing")
    parser.add_argument("--json", action="store_true", help="the table as JSON on standard output")
    parser.add_argument("--quiet", action="store_true", help="no lines while it runs")


def main(arguments: argparse.Namespace) -> int:
    """Run the sweep; 0 when every row is ok."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch")
    from stepscope.sweep.memory import parse_bytes

    fill_closed_streams()
    workload = find_workload(arguments)
    check_timeout(arguments.timeout)
    if arguments.max_batch and arguments.memory_limit:
        raise UsageError("--max-batch MEMORY is the memory limit of its points: leave --memory-limit out")
    try:
        limit = arguments.max_batch or arguments.memory_limit
        limit_bytes = parse_bytes(limit) if limit else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    points = _points(workload, arguments)
    if arguments.max_batch is not None:
        from stepscope.sweep.tuning.max_batch import max_batch_point

        points = [max_batch_point(point, limit_bytes) for point in points]
    if not points:
        raise UsageError("the grid has no points")
    if arguments.dry_run:
        return _dry_run(points, arguments.json)
    from stepscope.sweep.runner import Options

    options = Options(timeout_s=arguments.timeout, trace=arguments.trace, memory_limit_bytes=limit_bytes)
    searches = arguments.max_batch is not None
    return run_sweep(workload, points, options, arguments, verb="bench", answer=_answer, searches_batch=searches)


def check_timeout(seconds: float) -> None:
    """UsageError for a timeout that is none."""
    if not 0 < seconds < math.inf:
        raise UsageError(f"--timeout {seconds:g}: must be more than 0, and an end")


def _points(workload: Workload[Any], arguments: argparse.Namespace) -> list[Point]:
    from stepscope.sweep.grid import Grid, read_grids

    grid = Grid(workload, {"device": default_device()} if arguments.device is None else {})
    axes = typed_axes(grid, arguments, RUN_FLAGS)
    if arguments.grid is None:
        return grid.points([axes], arguments.zip)
    with users_code():
        grids, paired = read_grids(arguments.grid)
    return grid.points([{**axes, **listed} for listed in grids], paired or arguments.zip)


def default_device() -> str:
    """The device of this machine that a sweep runs on."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _answer(rows: list[dict[str, Any]], environments: dict[str, Any]) -> Answer:
    from stepscope.analysis.comparison.sweep_records import sweep_json
    from stepscope.analysis.comparison.sweeps import sweep_of
    from stepscope.document.sweep_table import sweep_document

    sweep = sweep_of(rows, environments)
    return lambda: sweep_document(sweep), lambda: sweep_json(sweep)


def run_sweep(
    workload: Workload[Any],
    points: list[Point],
    options: Options,
    arguments: argparse.Namespace,
    *,
    verb: str,
    answer: Callable[[list[dict[str, Any]], dict[str, Any]], Answer],
    searches_batch: bool = False,
    fine: Sequence[str] = ("ok",),
) -> int:
    """Run the points that have no row yet and print the `answer` to all rows; 0 when each row's status is `fine`."""
    from stepscope.analysis.comparison.sweeps import sweep_of
    from stepscope.cli.support.progress import Progress
    from stepscope.document.sweep_table import records_table, sweep_document
    from stepscope.formatting import plural
    from stepscope.render.write import write_sweep_tables
    from stepscope.sweep.results import Results
    from stepscope.sweep.runner import Runner, run_points
    from stepscope.sweep.server import Server, default_start
    from stepscope.sweep.tuning.max_batch import MaxBatch

    folder = arguments.output or default_folder(verb, arguments.workload)
    command = shlex.join(["stepscope", *sys.argv[1:]])
    teller = _Teller(points, arguments.quiet)
    facts = {"command": command, "working_folder": str(Path.cwd()), "stepscope": __version__}
    with Results(folder, facts, arguments.resume, resume_command(folder)) as results:
        interrupted = False
        asked = {point.hash for point in points}
        begun = len(results.hashes & asked) / len(points)
        with (
            Server(arguments.start or default_start()) as server,
            Progress(plural(len(points), "point"), begun, silent_s=0.0) as progress,
        ):
            progress(begun)
            runner = Runner(workload, server, results, options)

            def on_try(batch: int, status: str) -> None:
                progress.clear()
                teller.tried(batch, status)
                progress(len(results.hashes & asked) / len(points))

            def on_row(row: dict[str, Any], num_done: int) -> None:
                progress.clear()
                teller.finished(row, num_done)
                progress(num_done / len(points))

            run = MaxBatch(workload, runner, on_try).run if searches_batch else runner.run
            try:
                run_points(points, results, run, on_row)
            except KeyboardInterrupt:
                interrupted = True
        rows = results.rows
        sweep = sweep_of(rows, results.facts["environments"])
        with results.writing():
            write_sweep_tables(folder, sweep_document(sweep, command), records_table(sweep))
    if rows:
        document, to_json = answer(rows, results.facts["environments"])
        print_document(document, to_json, arguments.json, is_wide=True)
    tell(f"stepscope: {plural(len(rows), 'row')} in {folder}/results.jsonl, .csv, .md")
    if interrupted:
        tell(f"stepscope: interrupted; go on with  {resume_command(folder)}")
        return EXIT_INTERRUPTED
    return 0 if all(row["status"] in fine for row in rows if row["hash"] in asked) else EXIT_NOT_ALL_OK


class _Teller:
    """A line a finished point on standard error."""

    def __init__(self, points: list[Point], quiet: bool) -> None:
        from stepscope.analysis.comparison.sweeps import varying_axes

        self._num_points = len(points)
        self._varying = varying_axes([{"preset": p.preset, **p.config, **p.run} for p in points])[0]
        self._quiet = quiet

    def finished(self, row: dict[str, Any], num_done: int) -> None:
        from stepscope.document.sweep_table import row_line

        if not self._quiet:
            tell(f"{num_done}/{self._num_points}  {row_line(row, self._varying)}")

    def tried(self, batch: int, status: str) -> None:
        if not self._quiet:
            tell(f"  batch {batch}: {'fits' if status == 'ok' else status}")


def _dry_run(points: list[Point], as_json: bool) -> int:
    from stepscope.document.sweep_table import grid_document

    listed = [
        {"hash": p.hash, "workload": p.workload, "preset": p.preset, "config": dict(p.config), "run": dict(p.run)}
        for p in points
    ]
    print_document(lambda: grid_document(listed), lambda: {"points": listed}, as_json)
    return 0


def fill_closed_streams() -> None:
    """Open nothing in place of a closed standard stream: the next file opened would get what libraries print."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free


def default_folder(verb: str, workload: str) -> Path:
    """Where a sweep goes that was given no folder."""
    name = "".join(c if c.isalnum() else "-" for c in Path(workload).name)
    return Path("runs") / f"{verb}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def resume_command(folder: Path) -> str:
    """The command that goes on with this sweep: the same words, the folder, --resume."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if "-o" not in words and not any(word.startswith(("--output", "-o")) for word in words):
        words += ["-o", str(folder)]
    return shlex.join(["stepscope", *words, "--resume"])
