"""What verbs print: answers as text or JSON, one line if a stream is closed, and the progress of long work."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.document.card import Card
    from stepscope.document.model import Document

EXIT_INTERRUPTED = 130


def print_card(card: "Card", as_json: bool, stream: TextIO | None = None) -> None:
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
        import json

        write([json.dumps(to_json(), allow_nan=False), "\n"], stream)
        return
    color, width, _ = screen(stream)
    write(["\n", to_text(color, width), "\n"], stream)


def screen(stream: TextIO | None = None) -> tuple[bool, int, int]:
    """Return whether to use color, how wide a text may be, and how wide the terminal is."""
    color = is_terminal(stream or sys.stdout) and not os.environ.get("NO_COLOR")
    columns = shutil.get_terminal_size((100, 24)).columns
    return color, max(60, min(120, columns)), columns


def print_document(
    document: "Callable[[], Document]",
    to_json: Callable[[], Any],
    as_json: bool,
    num_rows: int | None = None,
    is_wide: bool = False,
) -> None:
    """Print a document on the terminal, or its result as JSON; a wide table uses the whole terminal."""

    def to_text(color: bool, width: int) -> str:
        from stepscope.render.terminal import terminal_text

        whole = max(width, shutil.get_terminal_size((width, 24)).columns) if is_wide else width
        return terminal_text(document(), whole, color, num_rows)

    print_result(to_json, to_text, as_json)


def print_answer(result: Any, as_json: bool, *options: Any, is_wide: bool = False) -> None:
    """Print a result on the terminal as the API shows it, or as JSON; `options` are those of its document."""

    def document() -> "Document":
        from stepscope.api.displays import document_of

        return document_of(result, *options)

    print_document(document, result.to_json, as_json, is_wide=is_wide)


def write(parts: Iterable[str], stream: TextIO | None = None) -> bool:
    """Write to `stream` (default: standard output), and return whether it is still being read.

    Bars become ASCII where the encoding lacks them, other characters `?`. A closed pipe is not an error;
    StepscopeError if writing fails for another reason.
    """
    stream = stream or sys.stdout
    if stream is None:
        raise StepscopeError("the answer could not be written: standard output is closed")
    encoding = stream.encoding or "utf-8"
    room = _MOST_COPIED
    try:
        for part in parts:
            room -= len(part)
            for copy in _copies:
                copy.append(part)
                if room < 0:  # of hundreds of ranks: it is not held in memory
                    copy.clear()
            if room < 0:
                _copies.clear()
            stream.write(_encodable(part, encoding))
        stream.flush()
        return True
    except OSError as error:
        for copy in _copies:
            copy.clear()  # what nobody received is not an answer
        # Python would report it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise StepscopeError(f"the answer could not be written: {error.strerror}") from None
        return False


_ASCII = str.maketrans({**dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#")), "–": "-", "−": "-", "µ": "u", "×": "x", "·": "-"})


def _encodable(text: str, encoding: str) -> str:
    """Return text that an encoding can write."""
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(_ASCII).replace("…", "...").encode(encoding, errors="replace").decode(encoding)


_copies: list[list[str]] = []
_MOST_COPIED = 1 << 24  # characters of an answer that is kept for the next time


@contextmanager
def copied() -> Iterator[list[str]]:
    """Yield a list that receives what is written to standard output within the block."""
    _copies.append([])
    try:
        yield _copies[-1]
    finally:
        if _copies:
            _copies.pop()


def tell(line: str, end: str = "\n") -> None:
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


_SILENT_S = 1.0
_EVERY_S = 0.1
_WIDTH = 24
_LEAST_SHARE = 0.02  # below this share of the work, the time left cannot be estimated


class Progress(AbstractContextManager["Progress"]):
    """A line on standard error that shows the share done; it disappears when the work ends."""

    def __init__(self, what: str, silent_s: float = _SILENT_S, resumes: bool = False) -> None:
        """With `resumes`, the first share was done by an earlier run, so its duration is unknown."""
        self._what = what
        self._begun = None if resumes else 0.0
        self._silent_s = silent_s
        self._is_shown = is_terminal(sys.stderr)
        self._start = time.monotonic()
        self._last = -_EVERY_S
        self._has_drawn = False

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove the line, so that another can be printed in its place."""
        if self._has_drawn:
            tell("\r\x1b[K", end="")
            self._has_drawn, self._last = False, -_EVERY_S

    def __call__(self, share: float) -> None:
        self._begun = share if self._begun is None else self._begun
        now = time.monotonic()
        if not self._is_shown or now - self._start < self._silent_s or now - self._last < _EVERY_S:
            return
        self._last, self._has_drawn = now, True
        bar = "█" * round(_WIDTH * share)
        tell(f"\r{self._what} {bar:<{_WIDTH}} {share:4.0%}  {self._left(share, now)}\x1b[K", end="")

    def above(self, quiet: bool) -> Callable[[str], None] | None:
        """Return a function that prints a line above this one; None if nothing is to be printed."""

        def tell_above(line: str) -> None:
            self.clear()
            tell(line)

        return None if quiet else tell_above

    def _left(self, share: float, now: float) -> str:
        done = share - (self._begun or 0.0)
        return f"{(now - self._start) * (1 - share) / done:.0f} s left" if done > _LEAST_SHARE else ""


@contextmanager
def doing(verb: str = "") -> Iterator[Callable[[str], None]]:
    """Yield a function that says on standard error what is being done; the line disappears when the work ends.

    If standard error is no terminal, long work has the name of its `verb`, and says what it does line by line.
    """
    is_shown = is_terminal(sys.stderr)

    def show(what: str) -> None:
        if is_shown:
            tell(f"\r{what[: shutil.get_terminal_size().columns - 3]} …\x1b[K", end="")
        elif verb:
            tell(f"stepscope {verb}: {what}")

    try:
        yield show
    finally:
        if is_shown:
            tell("\r\x1b[K", end="")
