"""The program that a verb runs, as it is typed: `train.py --lr 3`, `-- train.py --lr 3` or `-m package.train`."""

import argparse
from typing import Any


class _Program(argparse.Action):
    """A script and its arguments, without the `--` that may stand before it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values[values[:1] == ["--"] :])


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    add, rest = parser.add_argument, argparse.REMAINDER
    add("-m", dest="module", nargs=rest, metavar="MODULE …", help="run a module, like python -m")
    add("script", nargs=rest, action=_Program, metavar="SCRIPT …", help="the script and its arguments")
