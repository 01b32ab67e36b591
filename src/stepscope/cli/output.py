"""Printing a result: plain where nobody looks, JSON for machines."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.report.card import Card


def print_card(card: Card, as_json: bool, stream: TextIO | None = None) -> None:
    """Print a card."""
    print_result(card.to_json, card.text, as_json, stream)


def print_result(
    to_json: Callable[[], Any], to_text: Callable[[bool, int], str], as_json: bool, stream: TextIO | None = None
) -> None:
    """Print to `stream` (standard output): colour only on a terminal that has not said NO_COLOR.

    `to_text` is told whether to use colour, and how wide the terminal is.
    """
    stream = stream or sys.stdout
    try:
        if as_json:
            print(json.dumps(to_json(), allow_nan=False, default=str), file=stream, flush=True)
            return
        colour = stream.isatty() and not os.environ.get("NO_COLOR")
        encoding = stream.encoding or "utf-8"
        width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
        text = to_text(colour, width).encode(encoding, errors="replace").decode(encoding)
        print(f"\n{text}", file=stream, flush=True)
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError as error:
        raise StepscopeError(f"the result could not be written: {error.strerror}") from None
