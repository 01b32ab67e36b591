"""Printing a card: plain where nobody looks, JSON for machines."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, TextIO

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.report.card import Card


def print_card(card: Card, as_json: bool, stream: TextIO | None = None) -> None:
    """Print to `stream` (standard output): colour only on a terminal that has not said NO_COLOR."""
    stream = stream or sys.stdout
    try:
        _print(card, as_json, stream)
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError as error:
        raise StepscopeError(f"the card could not be written: {error.strerror}") from None


def _print(card: Card, as_json: bool, stream: TextIO) -> None:
    if as_json:
        print(json.dumps(card.to_json(), allow_nan=False, default=str), file=stream, flush=True)
        return
    colour = stream.isatty() and not os.environ.get("NO_COLOR")
    encoding = stream.encoding or "utf-8"
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    text = card.text(colour, width).encode(encoding, errors="replace").decode(encoding)
    print(f"\n{text}", file=stream, flush=True)
