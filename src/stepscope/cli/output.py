"""Printing a card: plain where nobody looks, JSON for machines."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from stepscope.report.card import Card


def print_card(card: Card, as_json: bool, stream: TextIO | None = None) -> None:
    """Print to `stream` (standard output): colour only on a terminal that has not said NO_COLOR."""
    stream = stream or sys.stdout
    if as_json:
        print(json.dumps(card.to_json(), allow_nan=False, default=str), file=stream)
        return
    colour = stream.isatty() and not os.environ.get("NO_COLOR")
    encoding = stream.encoding or "utf-8"
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    text = card.text(colour, width).encode(encoding, errors="replace").decode(encoding)
    print(f"\n{text}", file=stream, flush=True)
