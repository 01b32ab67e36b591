"""Shows the progress of long work on a terminal, after the first second."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from stepscope.cli.support.output import is_terminal, tell

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
def doing() -> Iterator[Callable[[str], None]]:
    """Yield a function that says on standard error what is being done; the line disappears when the work ends."""
    is_shown = is_terminal(sys.stderr)

    def show(what: str) -> None:
        if is_shown:
            tell(f"\r{what[: shutil.get_terminal_size().columns - 3]} …\x1b[K", end="")

    try:
        yield show
    finally:
        if is_shown:
            tell("\r\x1b[K", end="")
