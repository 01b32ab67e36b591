"""Measure a grid of configurations and print a complete table, even if some of them fail.

Each configuration (a point) runs in its own process. One that runs out of memory, crashes, hangs or computes a wrong
result is still a row in the table. Rows are written as they finish; continue an interrupted sweep with --resume.
Before a variant is timed, its results must match the workload's reference, and a trace must show that its code path
ran.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.
All combinations of comma-separated values are run. The exit code is 0 if every row is ok, 1 if any row is not, and 2
for a usage error.

--check compile, dtypes or precision runs a check instead: see stepscope bench --check compile --help.

examples:
  stepscope bench cs336 --preset tiny --set seq_len=64,128 --set attention=naive,sdpa --device cpu
  stepscope bench cs336 --preset small,medium --mode forward,step --dtype bf16,tf32 -o runs/sizes
  stepscope bench attention --zip --set seq_len=1024,4096 --set batch=16,4
  stepscope bench train.py:build --set width=256,512 --dry-run
  stepscope bench hydra --preset 100m --max-batch 40GiB
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.options import (
    RUN_FLAGS,
    add_point_arguments,
    add_sweep_arguments,
    place_of,
    typed_axes,
    typed_where,
)
from stepscope.cli.support.output import EXIT_INTERRUPTED, Progress, fill_closed_streams, print_document, tell
from stepscope.errors import UsageError, need_torch
from stepscope.formatting import plural

if TYPE_CHECKING:
    from stepscope.document.model import Document
    from stepscope.sweep.grid import Point
    from stepscope.sweep.results import Results
    from stepscope.sweep.runner import Options
    from stepscope.workloads.workload import Workload

    Answer = tuple[Callable[[], Document], Callable[[], Any]]  # what is printed: as a document, and as JSON values

EXIT_NOT_ALL_OK = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_point_arguments(parser, "workload to run", RUN_FLAGS)
    add = parser.add_argument
    add("--check", metavar="WHAT", help="compile, dtypes, precision: see --check WHAT --help")
    add("--zip", action="store_true", help="pair values in order instead of combining all")
    add("--grid", metavar="FILE", help="read points from file.toml or file.py:function")
    add("--max-batch", nargs="?", const="", metavar="MEMORY", help="find the largest batch that fits")
    add("--memory-limit", metavar="MEMORY", help="memory limit per point, e.g. 40GiB (default: none)")
    add("--trace", action="store_true", help="keep a trace of each point")
    add("--dry-run", action="store_true", help="print the points without running them")
    add_sweep_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    need_torch()
    from stepscope.api.sweeps import bench_points
    from stepscope.document.sweep_table import grid_document
    from stepscope.sweep.grid import find_workload
    from stepscope.sweep.memory import bytes_of
    from stepscope.sweep.runner import Options

    fill_closed_streams()
    if arguments.max_batch and arguments.memory_limit:
        raise UsageError("--max-batch MEMORY sets the memory limit of its points: leave --memory-limit out")
    searches = arguments.max_batch is not None
    limit = bytes_of(arguments.max_batch or arguments.memory_limit)
    workload = find_workload(arguments.workload)
    axes = typed_axes(arguments, RUN_FLAGS)
    points = bench_points(workload, axes, arguments.grid, arguments.zip, searches, limit)
    if arguments.dry_run:
        listed = [
            {"hash": p.hash, "workload": p.workload, "preset": p.preset, "config": dict(p.config), "run": dict(p.run)}
            for p in points
        ]
        print_document(lambda: grid_document(listed), lambda: {"points": listed}, arguments.json)
        return 0
    options = Options(timeout_s=arguments.timeout, trace=arguments.trace, memory_limit_bytes=limit)
    return run_and_print(workload, points, options, arguments, "bench", _answer, searches_batch=searches)


def _answer(results: Results) -> Answer:
    from stepscope.analysis.comparison.sweeps import sweep_json, sweep_of
    from stepscope.document.sweep_table import sweep_document

    sweep = sweep_of(results.rows, results.facts["environments"])
    return lambda: sweep_document(sweep), lambda: sweep_json(sweep)


def run_and_print(
    workload: Workload[Any],
    points: list[Point],
    options: Options,
    arguments: argparse.Namespace,
    verb: str,
    answer: Callable[[Results], Answer],
    searches_batch: bool = False,
    fine: Sequence[str] = ("ok",),
) -> int:
    """Run the points that have no row yet and print the answer; 0 if each row's status is `fine`."""
    from stepscope.api.sweeps import run_sweep
    from stepscope.rows import is_tried_again

    place = place_of(arguments, verb, arguments.workload)
    with Progress(plural(len(points), "point"), silent_s=0.0, resumes=True) as progress:
        tell_row = progress.above(arguments.quiet)
        where = (place, typed_where(arguments, arguments.start), searches_batch)
        results, is_interrupted = run_sweep(workload, points, options, *where, progress, tell_row)
    if results.rows:
        print_document(*answer(results), arguments.json, is_wide=True)
    tell(f"stepscope: {plural(len(results.rows), 'row')} in {place.folder}/results.jsonl, .csv, .md")
    if is_interrupted:
        tell(f"stepscope: interrupted; continue with  {place.resume_command}")
        return EXIT_INTERRUPTED
    if num_killed := sum(map(is_tried_again, results.rows)):
        killed = f"{plural(num_killed, 'point')} {'was' if num_killed == 1 else 'were'} killed"
        tell(f"stepscope: {killed} from outside; measure again with  {place.resume_command}")
    asked = {point.hash for point in points}
    is_fine = all(row["status"] in fine for row in results.rows if row["hash"] in asked)
    return 0 if is_fine else EXIT_NOT_ALL_OK
