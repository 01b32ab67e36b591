"""Show the card of a recording again.

examples:
  stepscope card runs/train-20260101-120000
  stepscope card runs/train-20260101-120000 --json
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, help="the folder a run left behind")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text (docs/card.md)")


def main(arguments: argparse.Namespace) -> int:
    from stepscope.cli.support.output import print_card
    from stepscope.document.card import Card

    print_card(Card.of(arguments.recording), arguments.json)
    return 0
