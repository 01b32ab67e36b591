"""Run a complete investigation: measure its points, answer its questions and write the report.

NAME is a study from stepscope list studies, or your own file (docs/studies.md). --quick takes minutes on two cores;
--full is for a GPU. Every point runs in its own process, and its row is written as soon as it finishes. Continue an
interrupted study with --resume; stepscope report DIR rewrites the report from the stored rows.

examples:
  stepscope study nano --quick --device cpu
  stepscope study cs336 --full -o runs/cs336
  stepscope study cs336 --full -o runs/cs336 --resume
  stepscope study my_study.py --quick
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.options import add_engine_arguments, place_of, seconds, typed_where
from stepscope.cli.support.output import EXIT_INTERRUPTED, Progress, fill_closed_streams, tell, write
from stepscope.errors import UsageError, need_torch
from stepscope.formatting import plural

if TYPE_CHECKING:
    from stepscope.studies.execute import Plan
    from stepscope.studies.study import Measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, add_mode = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("study", metavar="NAME", help="name of a study, or your own file")
    for mode, about in (("quick", "small configurations (default)"), ("full", "the whole investigation")):
        add_mode(f"--{mode}", dest="mode", action="store_const", const=mode, help=about)
    add("--device", choices=("cpu", "cuda"), help="where to run (default: cuda if available)")
    add("--timeout", type=seconds, default=900.0, metavar="S", help="time limit per point in seconds (default: 900)")
    add_engine_arguments(parser)
    add("-o", "--output", type=Path, metavar="DIR", help="folder for the study (default: runs/…)")
    add("--resume", action="store_true", help="continue an interrupted study")
    add("--no-report", action="store_true", help="measure only; needs only torch")
    add("--dry-run", action="store_true", help="print the points without running them")
    add("--quiet", action="store_true", help="suppress progress output")


def main(arguments: argparse.Namespace) -> int:
    """Run the study and write its report; 0 if it ran to its end, even if single points failed."""
    need_torch()
    from stepscope.studies.execute import begin, plan_of, run
    from stepscope.studies.registry import find_study
    from stepscope.sweep.grid import default_device
    from stepscope.workloads.users_code import users_code

    fill_closed_streams()
    if arguments.on == "local" and arguments.device == "cuda" and default_device() != "cuda":
        raise UsageError("--device cuda: PyTorch finds no CUDA device here. --device cpu runs on the CPU")
    with users_code():
        study = find_study(arguments.study)
        plan = plan_of(study, arguments.mode or "quick", arguments.device or default_device())
    if arguments.dry_run:
        write([f"{plan.study.title} ({plan.mode}, {plan.device}): {plural(plan.num_points, 'point')}\n"])
        for measure in plan.study.measures:
            write([f"  {measure.id:<14} {len(plan.points.get(measure.id, ())):>4}  {measure.about}\n"])
        return 0
    place = place_of(arguments, "study", arguments.study)
    folder, command, again = place.folder, place.command, place.resume_command
    is_own = arguments.study.endswith((".py", ".toml"))
    source = str(Path(arguments.study).resolve()) if is_own else arguments.study
    begin(plan, folder, source, command, arguments.resume, again)
    with Progress(f"{study.name}: {plural(plan.num_points, 'point')}", silent_s=0.0) as progress:

        def on_row(measure: Measure, row: dict[str, Any] | None, num_done: int) -> None:
            progress.clear()
            if row is not None and not arguments.quiet:
                tell(_line(measure, row, num_done, plan))
            progress(num_done / max(1, plan.num_points))

        try:
            where = typed_where(arguments)
            run(plan, folder, command, again, arguments.timeout, on_row, where, progress.above(arguments.quiet))
        except KeyboardInterrupt:
            progress.clear()
            tell(f"stepscope: interrupted; continue with  {again}")
            return EXIT_INTERRUPTED
    if arguments.no_report:
        own = arguments.study.endswith(".py")
        makes = again.replace(" --no-report", "") if own else f"stepscope report {shlex.quote(str(folder))}"
        tell(f"stepscope: measured; write the report with  {makes}")
        return 0
    from stepscope.studies.write import without_pictures, write_study

    tell(f"stepscope: {write_study(study, folder)}{without_pictures(folder)}")
    return 0


def _line(measure: Measure, row: dict[str, Any], num_done: int, plan: Plan) -> str:
    from stepscope.analysis.comparison.sweeps import varying_axes
    from stepscope.document.sweep_table import row_line

    points = plan.points[measure.id]
    names = varying_axes([{"preset": p.preset, **p.config, **p.run} for p in points])[0]
    return f"{num_done}/{plan.num_points}  {measure.id:<12} {row_line(row, names)}"
