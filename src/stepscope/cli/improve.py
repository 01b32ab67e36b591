"""Try what makes training faster on your own script, from outside, and keep what pays.

Runs the script for some steps, again and again, each time in a fresh process: unchanged, and with one more change
(TF32, bf16 autocast, torch.compile, a fused optimizer, channels last, SDPA, workers, pinned memory, cuDNN autotuning,
the allocator, threads). A change is kept if steps get shorter beyond chance, and if the losses stay within what its
arithmetic explains. At the end, the best combination is measured in alternation with the unchanged script.

The script is not edited: the last lines of the output say what to put into it. If it is killed, the same command goes
on where it stopped. Options come before SCRIPT. The exit code is 0 if changes were measured, whether any pays or not,
4 if there was no time for one, and 2 for a usage error or a script that fails unchanged.

examples:
  stepscope improve train.py --lr 3e-4
  stepscope improve --minutes 10 train.py
  stepscope improve --minutes 40 --resume train.py
  stepscope improve -m package.train --config small.toml
"""

import argparse
from pathlib import Path

from stepscope.api.improvement import improve
from stepscope.cli.support.options import chosen, positive, seconds, share
from stepscope.cli.support.output import Progress, print_answer, tell
from stepscope.cli.support.program import add_program_arguments
from stepscope.errors import UsageError
from stepscope.formatting import safe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, allowed = parser.add_argument, "allowed loss difference (default: depends on the change)"
    add("--minutes", type=seconds, default=20.0, metavar="M", help="time budget in minutes (default 20)")
    add("--warmup", type=positive, default=8, metavar="N", help="warm-up steps excluded from timing (default 8)")
    add("--clean", type=positive, default=20, metavar="N", help="timed steps per run (default 20)")
    add("--fix", action="append", default=[], metavar="ID", help="try only this; may be repeated (default: all)")
    add("--tolerance", type=share, metavar="P%", help=allowed)
    add("--timeout", type=positive, default=1800, metavar="S", help="time limit per run in seconds (default 1800)")
    add("-o", "--output", type=Path, metavar="DIR", help="folder for the runs (default: runs/improve-…)")
    add("--resume", action="store_true", help="go on after the time was up, with all runs from before")
    add("--json", action="store_true", help="print JSON instead of text (docs/improve.md)")
    add("--quiet", action="store_true", help="suppress progress output")
    add_program_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    words = arguments.module or arguments.script
    if not words:
        raise UsageError("name a script: stepscope improve train.py, or a module: stepscope improve -m package.train")
    with Progress(f"improving {safe(words[0], 40)}", silent_s=0.0) as progress:
        result = improve(
            *words,
            is_module=bool(arguments.module),
            **chosen(arguments, "minutes", "warmup", "clean", "fix", "tolerance", "output", "resume"),
            timeout_s=arguments.timeout,
            on_line=progress.above(arguments.quiet),
            progress=progress,
        )
    print_answer(result, arguments.json)
    if not result.is_finished:
        how = "" if result.is_interrupted else " with --resume and more --minutes"
        tell(f"stepscope: not everything was tried. To go on, run the command again{how}.")
    return result.exit_code
