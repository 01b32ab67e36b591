"""Runs `stepscope` with one function of ours that raises, and tells which functions of ours the script's process ran.

    python faults.py '["recorder/loop.py", "Loop.listens", 3]' run -o recording train.py

Python calls a profile function whenever a function begins, and what that raises, the function seems to raise. So
nothing has to be prepared for a function to fail, and a new function cannot be forgotten. At the end `faults.json`
has the `calls` of each function, those `entered` from code that is not ours, and whether the fault was `hit`.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import threading
from collections import Counter
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

BETWEEN = ("contextlib.py", "functools.py", "<string>")  # calls between two of ours go through these
FIRST = ("cli/run.py", "_Run.prepare")  # before, there is no script to protect


class Fault(RuntimeError):
    """An ordinary exception."""


class Injector:
    """Counts the calls of our functions, and raises in one of them."""

    def __init__(self, ours: str, target: list[Any] | None) -> None:
        self._ours, self._target = ours, tuple(target) if target else None
        self._pid, self._is_armed = os.getpid(), False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.entered: set[tuple[str, str]] = set()
        self.is_hit = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._ours):
            return
        if code.co_flags & CO_GENERATOR and frame.f_lasti > 2:
            return  # a generator that goes on
        key = code.co_filename[len(self._ours) :], code.co_qualname
        self._is_armed |= key == FIRST
        if not self._is_armed:
            return
        self.calls[key] += 1
        back = frame.f_back
        while back is not None and back.f_code.co_filename.endswith(BETWEEN):
            back = back.f_back
        if back is None or not back.f_code.co_filename.startswith(self._ours):
            self.entered.add(key)
        if self._target == (*key, self.calls[key]):
            self.is_hit = True
            raise Fault("injected")

    def write(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        if os.getpid() == self._pid:
            found = {"calls": [[*key, num] for key, num in self.calls.items()], "entered": sorted(self.entered)}
            Path("faults.json").write_text(json.dumps({**found, "hit": self.is_hit}))


def main() -> None:
    import stepscope

    target, *words = sys.argv[1:]
    injector = Injector(os.path.join(os.path.dirname(stepscope.__file__), ""), json.loads(target))  # noqa: PTH118, PTH120
    folder = Path.cwd()
    atexit.register(lambda: (os.chdir(folder), injector.write()))
    sys.argv = ["stepscope", *words]
    sys.path[0] = os.fspath(folder)
    threading.setprofile(injector)
    sys.setprofile(injector)
    runpy.run_module("stepscope", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
