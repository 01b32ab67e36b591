"""A process becomes a point's: its own output, its own end."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.sweep.point_process import Request, run_point

# Of prctl(2).
PARENT_DEATH_SIGNAL = 1
CHILD_SUBREAPER = 36


def begin(request: Request, parent_id: int) -> None:
    """Make this process, a child of `parent_id`, the point's, and run it. Never returns."""
    die_with_parent(parent_id)
    descriptor = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _close_inherited()
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


def die_with_parent(parent_id: int) -> None:
    """On Linux, be killed when our parent ends."""
    set_process(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_id:
        os._exit(1)  # it was already gone


def set_process(option: int, value: int) -> None:
    """Set one of the kernel's options of this process; nothing where there are none."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def _close_inherited() -> None:
    """Leave a point nothing but its three streams: what it writes elsewhere must not reach the server's pipes."""
    listed = Path("/proc/self/fd")
    if not listed.is_dir():
        os.closerange(3, 1024)
        return
    for entry in list(listed.iterdir()):
        try:
            # A driver's library that was asked for the number of GPUs keeps its device open, and will use it again.
            if int(entry.name) > 2 and not str(entry.readlink()).startswith("/dev/"):
                os.close(int(entry.name))
        except OSError:
            pass  # it was the listing's own


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
    begin(request_of(json.loads(sys.argv[1])), int(sys.argv[2]))
