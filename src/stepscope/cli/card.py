"""Show the card of a recording again.

examples:
  stepscope card runs/train-20260101-120000
  stepscope card runs/train-20260101-120000 --json
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, nargs="?", help="the folder of a run (default: the latest run)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text (docs/card.md)")


def main(arguments: argparse.Namespace) -> int:
    from stepscope.api import read
    from stepscope.cli.support.output import print_card

    print_card(read(arguments.recording), arguments.json)
    return 0
