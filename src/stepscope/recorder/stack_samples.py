"""Where Python is during one step: another thread looks at the stack of the one that trains.

Only in the step before the trace, which no figure is about. A line is the innermost one of the script. Where a
package runs the loop, as a trainer does, it is the package's: the script's line would be the call of the trainer.

A thread can look only where Python lets it run: where the other one waits, such as in an op, or some time after it
asked to run. That is 5 ms as a rule, in which a loop over samples comes to its next op, and the op would be blamed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from stepscope.recorder import wall
from stepscope.recorder.frames import is_library, is_pythons, place, script_frames

PERIOD_S = 0.002
_SOON_S = 0.00002
MOST_LINES = 40
OTHER = "other"
_DEEP = 4  # calls of a package inside a line of the script: more are no function that it calls, but a trainer


class StackSampler:
    """Counts by phase and line what the thread that starts it does, until it is stopped."""

    def __init__(self, phase: Callable[[], str | None]) -> None:
        self._phase = phase
        self._ident = threading.get_ident()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._ended = threading.Event()
        self._interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SOON_S)
        self._thread = threading.Thread(target=wall.guarded(self._look), name="stepscope-stacks", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any] | None:
        """Return what was seen: `num_samples`, and `lines` by `phase` and `place`; None if nothing was."""
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._interval_s)
        lines = [
            {"phase": phase, "place": where, "num_samples": num}
            for (phase, where), num in self._counts.most_common(MOST_LINES)
        ]
        return {"num_samples": self._counts.total(), "lines": lines} if lines else None

    def _look(self) -> None:
        while not self._ended.wait(PERIOD_S):
            frame = sys._current_frames().get(self._ident)
            if frame is not None and (found := line_of(frame)) is not None:
                self._counts[self._phase() or OTHER, found] += 1


def line_of(frame: FrameType) -> str | None:
    """Return the line that a stack is at, as `train.py:42 encode`; None if it is of no script and no package."""
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
