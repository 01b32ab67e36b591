"""Where Python is during one step: another thread looks at the stack of the one that trains.

Only in the step before the trace, which no figure is about. A line is the innermost one of the script. Where a
package runs the loop, as a trainer does, it is the package's: the script's line would be the call of the trainer.

A thread can look only where Python lets it run: where the other one waits, such as in an op, or some time after it
asked to run. That is 5 ms as a rule, in which a loop over samples comes to its next op, and the op would be blamed.
"""

from __future__ import annotations

import _thread
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from stepscope.recorder.frames import is_library, is_ours, is_pythons, place, script_frames

PERIOD_S = 0.002
MOST_LINES = 40
OTHER = "other"
_DEEP = 4  # calls of a package inside a line of the script: more are no function that it calls, but a trainer
_SOON_S = 0.00002
_usual_s: float | None = None  # the script's own interval between threads, while a sampler has changed it


def _restore_interval() -> None:
    global _usual_s
    usual_s, _usual_s = _usual_s, None
    if usual_s is not None and abs(sys.getswitchinterval() - _SOON_S) < _SOON_S / 2:  # else the script has set one
        sys.setswitchinterval(usual_s)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_interval)  # a DataLoader's worker keeps no sampler


class StackSampler:
    """Counts by phase and line what the thread that starts it does, until it is stopped.

    The thread that looks is not one of `threading`'s, because scripts count those.
    """

    def __init__(self, phase: Callable[[], str | None]) -> None:
        global _usual_s
        self._phase = phase
        self._ident, self._pid = _thread.get_ident(), os.getpid()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._goes_on, self._runs = _thread.allocate_lock(), _thread.allocate_lock()
        self._goes_on.acquire()
        self._runs.acquire()
        self._is_over = False
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the limit on processes is reached
            self._is_over = True
            return
        _usual_s = sys.getswitchinterval()
        sys.setswitchinterval(_SOON_S)

    def stop(self) -> dict[str, Any] | None:
        """Return what was seen: `num_samples`, and `lines` by `phase` and `place`; None if nothing was."""
        if self._is_over or os.getpid() != self._pid:
            return None
        self._is_over = True
        _restore_interval()
        self._goes_on.release()
        self._runs.acquire()
        lines = [
            {"phase": phase, "place": where, "num_samples": num}
            for (phase, where), num in self._counts.most_common(MOST_LINES)
        ]
        return {"num_samples": self._counts.total(), "lines": lines} if lines else None

    def _run(self) -> None:
        try:
            while not self._goes_on.acquire(timeout=PERIOD_S):
                self._look()
        finally:
            self._runs.release()

    def _look(self) -> None:
        # In a function of its own: a frame that is held while this thread waits would keep tensors of the script.
        with suppress(Exception):
            frame = sys._current_frames().get(self._ident)
            if frame is not None and (found := line_of(frame)) is not None:
                self._counts[self._phase() or OTHER, found] += 1


def line_of(frame: FrameType) -> str | None:
    """Return the line that a stack is at, as `train.py:42 encode`; None if it is of no script and no package, or in
    Stepscope, which prepares the trace."""
    if is_ours(frame.f_code.co_filename):
        return None
    packages: list[FrameType] = []
    for each in script_frames(frame):
        file = each.f_code.co_filename
        if is_pythons(file) or file.startswith("<"):
            continue
        if not is_library(file):
            return _text(each if len(packages) <= _DEEP else packages[0])
        packages.append(each)
    return _text(packages[0]) if packages else None


def _text(frame: FrameType) -> str:
    return f"{place(frame)} {frame.f_code.co_name}"
