"""Redo a whole investigation: measure its points, answer its questions, write the report.

NAME is one of stepscope list studies, or a file of your own (docs/studies.md). --quick takes minutes on two cores;
--full is for a GPU. Every point runs in a process of its own and is a row when it is done; a study that was
interrupted goes on with --resume, and stepscope report DIR makes the report again from what is stored.

examples:
  stepscope study nano --quick --device cpu
  stepscope study cs336 --full -o runs/cs336
  stepscope study cs336 --full -o runs/cs336 --resume
  stepscope study my_study.py --quick
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from stepscope.studies.execute import Plan
    from stepscope.studies.study import Measure

EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument("study", metavar="NAME", help="a study, or a file of your own")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", dest="mode", action="store_const", const="quick", help="small points (the default)")
    mode.add_argument("--full", dest="mode", action="store_const", const="full", help="the whole investigation")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: cuda where there is one)")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="kill a point after (default 900)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the study's folder (default: runs/…)")
    parser.add_argument("--resume", action="store_true", help="go on with a study that was interrupted")
    parser.add_argument("--no-report", action="store_true", help="measure only: where the read side is not installed")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured and run nothing")
    parser.add_argument("--quiet", action="store_true", help="no lines while it runs")


def main(arguments: argparse.Namespace) -> int:
    """Run the study and write its report; 0 when it ran through, whatever single points came to."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch")
    if not 0 < arguments.timeout < math.inf:
        raise UsageError(f"--timeout {arguments.timeout:g}: must be more than 0, and an end")
    from stepscope.cli.bench import default_device, default_folder, fill_closed_streams, resume_command
    from stepscope.cli.support.output import tell
    from stepscope.cli.support.users_code import users_code
    from stepscope.studies.execute import begin, plan_of, run
    from stepscope.studies.registry import find_study

    fill_closed_streams()
    if arguments.device == "cuda" and default_device() != "cuda":
        raise UsageError("--device cuda: PyTorch sees no CUDA device here; --device cpu runs on the CPU")
    with users_code():
        study = find_study(arguments.study)
        plan = plan_of(study, arguments.mode or "quick", arguments.device or default_device())
    if arguments.dry_run:
        return _dry_run(plan)
    folder = arguments.output or default_folder("study", arguments.study)
    command, again = shlex.join(["stepscope", *sys.argv[1:]]), resume_command(folder)
    begin(plan, folder, _source(arguments.study), command, arguments.resume, again)
    from stepscope.cli.support.progress import Progress
    from stepscope.formatting import plural

    with Progress(f"{study.name}: {plural(plan.num_points, 'point')}", silent_s=0.0) as progress:

        def on_row(measure: Measure, row: dict[str, Any] | None, num_done: int) -> None:
            progress.clear()
            if row is not None and not arguments.quiet:
                tell(_line(measure, row, num_done, plan))
            progress(num_done / max(1, plan.num_points))

        try:
            run(plan, folder, command, again, arguments.timeout, on_row)
        except KeyboardInterrupt:
            progress.clear()
            tell(f"stepscope: interrupted; go on with  {again}")
            return EXIT_INTERRUPTED
    if arguments.no_report:
        own = arguments.study.endswith(".py")
        makes = again.replace(" --no-report", "") if own else f"stepscope report {shlex.quote(str(folder))}"
        tell(f"stepscope: measured; {makes} makes the report")
        return 0
    from stepscope.studies.write import write_study

    tell(f"stepscope: {write_study(study, folder)}")
    return 0


def _source(name: str) -> str:
    return str(Path(name).resolve()) if name.endswith((".py", ".toml")) else name


def _line(measure: Measure, row: dict[str, Any], num_done: int, plan: Plan) -> str:
    from stepscope.analysis.comparison.sweeps import varying_axes
    from stepscope.document.sweep_table import row_line

    points = plan.points[measure.id]
    names = varying_axes([{"preset": p.preset, **p.config, **p.run} for p in points])[0]
    return f"{num_done}/{plan.num_points}  {measure.id:<12} {row_line(row, names)}"


def _dry_run(plan: Plan) -> int:
    from stepscope.cli.support.output import write
    from stepscope.formatting import plural

    lines = [f"{plan.study.title} ({plan.mode}, {plan.device}): {plural(plan.num_points, 'point')}"]
    for measure in plan.study.measures:
        lines.append(f"  {measure.id:<14} {len(plan.points.get(measure.id, ())):>4}  {measure.about}")
    write(["\n".join(lines), "\n"])
    return 0
