"""The whole terminal, drawn anew again and again, and left as it was. Needs nothing but escape codes and termios."""

import os
import select
import shutil
import signal
import sys
import termios
import tty
from contextlib import AbstractContextManager, suppress
from typing import Any

from stepscope.cli.support.output import is_terminal, write

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # another screen, no cursor, no wrapping of long lines
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_SIGNALS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP)


def can_draw() -> bool:
    """Return whether standard output is a terminal that can be drawn on."""
    return is_terminal(sys.stdout) and os.environ.get("TERM", "dumb") not in ("", "dumb")


class Screen(AbstractContextManager["Screen"]):
    """Takes the terminal until the block ends, whatever ends it. Only for the main thread."""

    def __enter__(self) -> "Screen":
        self._awake, self._wake = os.pipe()
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._keyboard = termios.tcgetattr(0) if is_terminal(sys.stdin) and sys.stdin.fileno() == 0 else None
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for descriptor in (self._awake, self._wake):
            os.close(descriptor)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        columns, lines = shutil.get_terminal_size((80, 24))
        return max(1, columns), max(1, lines)

    def draw(self, text: str, last: str) -> None:
        """Show as many lines of a text as there is room for, and one at the bottom."""
        _, num_lines = self.size
        lines = text.splitlines()
        if len(lines) > num_lines - 2:
            hidden = len(lines) - num_lines + 2
            lines = lines[: max(0, num_lines - 2)]
            last = f"{last}   {hidden} more lines with --once"
        lines += [""] * (num_lines - 1 - len(lines))
        write(["\x1b[H", *(f"{line}\x1b[0m\x1b[K\n" for line in lines), f"{last}\x1b[0m\x1b[K"])

    def wait(self, seconds: float) -> str:
        """Return the key that was pressed; empty after so many seconds, or if the terminal has changed."""
        keyboard = [0] if self._keyboard is not None else []
        ready = select.select([*keyboard, self._awake], [], [], seconds)[0]
        if self._awake in ready:
            os.read(self._awake, 1024)
        if 0 in ready:
            typed = os.read(0, 1024)
            return typed.decode(errors="replace") or "q"  # empty: the terminal is gone
        return ""

    def _take(self) -> None:
        if self._keyboard is not None:
            tty.setcbreak(0)  # keys come at once and are not shown; Ctrl-C still interrupts
        write([_ENTER])

    def _give_back(self) -> None:
        with suppress(OSError, termios.error):  # a terminal that was closed
            write([_LEAVE])
            if self._keyboard is not None:
                termios.tcsetattr(0, termios.TCSADRAIN, self._keyboard)

    def _on_signal(self, number: int, _: Any) -> None:
        if number in (signal.SIGTERM, signal.SIGHUP):
            raise SystemExit(128 + number)
        if number == signal.SIGTSTP:
            self._give_back()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)  # returns when the shell continues this process
            signal.signal(number, self._on_signal)
            self._take()
        os.write(self._wake, b".")
