"""Prints answers: text for people, JSON for programs, one line if a stream is closed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.document.card import Card
    from stepscope.document.model import Document


EXIT_INTERRUPTED = 130


def print_card(card: Card, as_json: bool, stream: TextIO | None = None) -> None:
    from stepscope.document.card import card_document
    from stepscope.render.terminal import terminal_text

    print_result(card.to_json, lambda color, width: terminal_text(card_document(card), width, color), as_json, stream)


def print_result(
    to_json: Callable[[], Any], to_text: Callable[[bool, int], str], as_json: bool, stream: TextIO | None = None
) -> None:
    """Print to `stream` (default: standard output); color only on a terminal without NO_COLOR.

    `to_text` receives whether to use color and how wide the terminal is.
    """
    if as_json:
        write([json.dumps(to_json(), allow_nan=False), "\n"], stream)
        return
    color = is_terminal(stream or sys.stdout) and not os.environ.get("NO_COLOR")
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    write(["\n", to_text(color, width), "\n"], stream)


def print_document(
    document: Callable[[], Document],
    to_json: Callable[[], Any],
    as_json: bool,
    num_rows: int | None = None,
    is_wide: bool = False,
) -> None:
    """Print a document on the terminal, or its result as JSON; a wide table uses the whole terminal."""
    from stepscope.render.terminal import terminal_text

    def to_text(color: bool, width: int) -> str:
        whole = max(width, shutil.get_terminal_size((width, 24)).columns) if is_wide else width
        return terminal_text(document(), whole, color, num_rows)

    print_result(to_json, to_text, as_json)


def print_answer(result: Any, as_json: bool, *options: Any, is_wide: bool = False) -> None:
    """Print a result on the terminal as the API shows it, or as JSON; `options` are those of its document."""
    from stepscope.api.displays import document_of

    print_document(lambda: document_of(result, *options), result.to_json, as_json, is_wide=is_wide)


def write(parts: Iterable[str], stream: TextIO | None = None) -> None:
    """Write to `stream` (default: standard output), with `?` for what its encoding lacks.

    A closed pipe is not an error; StepscopeError if writing fails for another reason.
    """
    stream = stream or sys.stdout
    if stream is None:
        raise StepscopeError("the answer could not be written: standard output is closed")
    encoding = stream.encoding or "utf-8"
    try:
        for part in parts:
            stream.write(part.encode(encoding, errors="replace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Python would report it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise StepscopeError(f"the answer could not be written: {error.strerror}") from None


def tell(line: str, end: str = "\n") -> None:
    """Print a line on standard error, if there is one."""
    if sys.stderr is not None:  # else print would take standard output
        with contextlib.suppress(OSError):
            print(line, end=end, file=sys.stderr, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; one that was closed before Python started is None."""
    return stream is not None and stream.isatty()


def fill_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams, or the next file opened would get what libraries print."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor
