"""How far long work has come, and how long it will take: on a terminal, after the first second."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from stepscope.cli.output import is_terminal

_SILENT_S = 1.0
_EVERY_S = 0.1
_WIDTH = 24


class Progress:
    """A line on standard error that is told the share done, and is gone when the work is."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_shown = is_terminal(sys.stderr)
        self._start = self._last = time.monotonic()
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
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if not self._is_shown or now - self._start < _SILENT_S or now - self._last < _EVERY_S:
            return
        self._last, self._has_drawn = now, True
        left = f"{(now - self._start) * (1 - share) / share:.0f} s left" if share > 0.02 else ""
        bar = "█" * round(_WIDTH * share)
        print(f"\r{self._what} {bar:<{_WIDTH}} {share:4.0%}  {left}\x1b[K", end="", file=sys.stderr, flush=True)
