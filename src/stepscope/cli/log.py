"""Log a finished recording, sweep or study to an experiment tracker.

Steps become series, the card the summary, findings a table, report and trace artifacts. A sweep becomes one run per
point, with its parameters. `stepscope run --log-to` does the same while a script runs.

examples:
  stepscope log runs/train-20260101-120000 --to tensorboard
  stepscope log runs/train-20260101-120000 --to mlflow:sqlite:///mlflow.db
  stepscope log runs/bench-20260101-120000 --to wandb:my-project
"""

import argparse
from pathlib import Path

from stepscope.cli.support.output import tell
from stepscope.formatting import plural, safe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="recording, sweep or study")
    about = "mlflow, wandb, tensorboard or trackio[:WHERE]"
    add("--to", action="append", required=True, metavar="TRACKER", help=about)
    add("--follow", type=int, metavar="RANK", help=argparse.SUPPRESS)  # started by `stepscope run --log-to`


def main(arguments: argparse.Namespace) -> int:
    from stepscope.api.tracking import follow_recording, log

    if arguments.follow is not None:
        follow_recording(arguments.path, arguments.to, arguments.follow)
        return 0
    for target in arguments.to:
        num_runs = log(arguments.path, target)
        tell(f"stepscope: logged {plural(num_runs, 'run')} to {safe(target)}")
    return 0
