"""How far long work has come, and how long it will take: on a terminal, after the first second."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType

from stepscope.cli.support.output import is_terminal, tell

_SILENT_S = 1.0
_EVERY_S = 0.1
_WIDTH = 24
# A smaller share of the work says nothing yet about the rest of it.
_TELLING_SHARE = 0.02


class Progress:
    """A line on standard error that is told the share done, and is gone when the work is."""

    def __init__(self, what: str, begun: float = 0.0, silent_s: float = _SILENT_S) -> None:
        """`begun` is the share that was done before: nobody knows how long it took."""
        self._what = what
        self._begun = begun
        self._silent_s = silent_s
        self._is_shown = is_terminal(sys.stderr)
        self._start = time.monotonic()
        self._last = -_EVERY_S
        self._has_drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the line away, so that another can be printed in its place."""
        if self._has_drawn:
            tell("\r\x1b[K", end="")
            self._has_drawn, self._last = False, -_EVERY_S

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if not self._is_shown or now - self._start < self._silent_s or now - self._last < _EVERY_S:
            return
        self._last, self._has_drawn = now, True
        bar = "█" * round(_WIDTH * share)
        tell(f"\r{self._what} {bar:<{_WIDTH}} {share:4.0%}  {self._left(share, now)}\x1b[K", end="")

    def _left(self, share: float, now: float) -> str:
        done = share - self._begun
        return f"{(now - self._start) * (1 - share) / done:.0f} s left" if done > _TELLING_SHARE else ""


class Doing:
    """A line on standard error that says what is being done, on a terminal; it is gone when the work is."""

    def __init__(self) -> None:
        self._is_shown = is_terminal(sys.stderr)

    def __enter__(self) -> Doing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._is_shown:
            tell("\r\x1b[K", end="")

    def __call__(self, what: str) -> None:
        if self._is_shown:
            width = shutil.get_terminal_size().columns
            tell(f"\r{what[: width - 3]} …\x1b[K", end="")
