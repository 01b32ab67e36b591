"""Measure a built-in training script, find what is wrong with it, and open the page: a first look in a minute.

The script trains a small picture classifier on this machine, without data or a network. Its recording is like that
of any script: try `diagnose`, `verify` and `improve` on it (docs/tutorial.md).

examples:
  stepscope demo
  stepscope demo -o runs/first --no-open
"""

import argparse
import subprocess
import sys
from pathlib import Path

from stepscope.cli.support.output import tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, Path("runs/demo")
    add("-o", "--output", type=Path, default=default, metavar="DIR", help=f"folder (default: {default})")
    add("--no-open", action="store_true", help="write the page, but do not open it")


def main(arguments: argparse.Namespace) -> int:
    script = Path(__file__).parents[1] / "workloads" / "demo.py"
    folder = str(arguments.output)
    page = ["report", folder, "--force", *([] if arguments.no_open else ["--open"])]
    for words in (["run", "-o", folder, "--force", str(script)], ["diagnose", folder], page):
        tell(f"stepscope demo: stepscope {' '.join(words)}")
        if code := subprocess.run([sys.executable, "-m", "stepscope", *words]).returncode:
            return code
    return 0
