"""Take a window from a job that is running, without restarting it.

The job was started with `stepscope run` or stepscope.record(). All ranks take the window at the same step: a warm-up
step, timed steps, then traced ones. It becomes a recording of its own, RUN/window1, RUN/window2, …, which
`diagnose`, `compare`, `report` and `show` read. With --when, the job takes windows by itself: 'step_time > 1.5x'
(of its median so far), 'step_time > 2s', 'memory > 90%', 'memory > 60GiB', 'every 2h' or 'every 500 steps'.

examples:
  stepscope trigger
  stepscope trigger runs/train-20260101-120000 --trace 5 --memory
  stepscope trigger runs/train-20260101-120000 --when 'step_time > 1.5x' --limit 2
"""

import argparse
from pathlib import Path

from stepscope.cli.support.output import tell
from stepscope.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, nargs="?", metavar="RUN", help="folder of the running job (default: the latest run)")
    add("--trace", type=int, default=3, metavar="N", help="traced steps, 0 for none, at most 200 (default 3)")
    add("--clean", type=int, default=6, metavar="N", help="timed steps before the trace (default 6)")
    add("--memory", action="store_true", help="record the source line of every allocation")
    add("--stacks", action="store_true", help="add Python stacks to the trace")
    add("--when", metavar="CONDITION", help="take windows when this becomes true")
    add("--limit", type=int, metavar="N", help="most windows for --when (default 3)")


def main(arguments: argparse.Namespace) -> int:
    from stepscope.api.triggering import trigger
    from stepscope.recorder.history.conditions import limit_of
    from stepscope.session import latest_run

    try:
        limit = limit_of(arguments.limit, [arguments.when] if arguments.when else [])
    except ValueError as error:
        raise UsageError(str(error)) from None
    folder = trigger(
        arguments.run or latest_run(),
        trace=arguments.trace,
        clean=arguments.clean,
        memory=arguments.memory,
        stacks=arguments.stacks,
        when=arguments.when,
        limit=limit,
        tell=lambda line: tell(f"stepscope: {line}"),
    )
    if folder is not None:
        print(folder)
        tell(f"stepscope: next: stepscope diagnose {folder}, stepscope report {folder} --open")
    return 0
