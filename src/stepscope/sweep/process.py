"""A process becomes a point's: its own output, its own end."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.sweep.point_process import Request, run_point


def begin(request: Request) -> None:
    """Make this process the point's, and run it. Never returns."""
    _die_with_parent()
    descriptor = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # Python's own streams may have been closed or replaced in the process we come from.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    _be_the_first_to_go()
    run_point(request)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # the workload may have closed it
    os._exit(0)  # no teardown: a library's exit handlers must not turn a finished point into a crash


def _die_with_parent() -> None:
    """On Linux, be killed when the process that watches over us is."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        pass
    if os.getppid() == 1:
        os._exit(1)  # it was already gone


def _be_the_first_to_go() -> None:
    """Should the kernel run out of memory, it is the point that must be killed, not the sweep."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError:
        pass


def request_of(values: Mapping[str, Any]) -> Request:
    """A request from its JSON."""
    return Request(**values)


if __name__ == "__main__":
    begin(request_of(json.loads(sys.argv[1])))
