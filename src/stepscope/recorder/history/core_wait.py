"""What the machine leaves to a process: how long its training waits for a CPU core, and the memory that is left."""

from __future__ import annotations

import _thread
import os
import time
from pathlib import Path

PERIOD_NS = 250_000_000  # between two readings


class CoreTimes:
    """How long the thread that trains has run on a core, and could have run but other threads had the cores (Linux).

    That thread reads both itself, at the end of a step. Read by another one, they would be those of some moment
    inside a step, and a share of the next second would count for this one.
    """

    def __init__(self) -> None:
        self._due_ns = 0

    def read(self, now_ns: int) -> tuple[int, int] | None:
        """Return the ns on a core and waiting for one; None if that was read lately, or the kernel does not say."""
        if now_ns < self._due_ns:
            return None
        self._due_ns = now_ns + PERIOD_NS
        try:
            descriptor = os.open(f"/proc/self/task/{_thread.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return time.thread_time_ns(), int(os.read(descriptor, 100).split()[1])
            finally:
                os.close(descriptor)
        except (OSError, ValueError, IndexError):
            self._due_ns = 2**63
            return None


def available_bytes() -> int | None:
    """Return the memory that this process can still get; None where that is not known."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_bytes().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith(b"MemAvailable:")]
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_bytes()) for name in ("max", "current"))
        found.append(limit - used)
    except (OSError, ValueError, IndexError):
        pass  # no limit
    return max(0, min(found)) if found else None
