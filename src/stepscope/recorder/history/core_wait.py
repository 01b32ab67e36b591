"""What the machine leaves to a process: how long its training waits for a CPU core, and the memory that is left."""

from __future__ import annotations

import _thread
import os
import time
from pathlib import Path

PERIOD_NS = 250_000_000  # between two readings
_NEVER = 2**63
STAT = Path("/proc/stat")


class CoreTimes:
    """How long the thread that trains has run on a core, and could have run but other threads had the cores (Linux).

    That thread reads both itself, at the end of a step. Read by another one, they would be those of some moment
    inside a step, and a share of the next second would count for this one.
    """

    def __init__(self) -> None:
        self._due_ns = 0
        self._thread: int | None = None  # which reads; one that ends the recording may be another

    def read(self, now_ns: int, is_due: bool = False) -> tuple[int, int] | None:
        """Return the ns on a core and waiting for one; None if the kernel does not say, or if it was read lately."""
        if now_ns < self._due_ns and not (is_due and self._due_ns < _NEVER):
            return None
        thread = _thread.get_native_id()
        if self._thread not in (None, thread):
            return None
        self._due_ns, self._thread = now_ns + PERIOD_NS, thread
        try:
            descriptor = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return time.thread_time_ns(), int(os.read(descriptor, 100).split()[1])
            finally:
                os.close(descriptor)
        except (OSError, ValueError, IndexError):
            self._due_ns = _NEVER
            return None


class OtherProcesses:
    """How much of the machine's cores others use (Linux): other processes, and other machines on the same host."""

    def __init__(self) -> None:
        self._earlier: tuple[int, int, float] | None = None  # time of all cores and busy time in ticks, own seconds

    def share(self) -> float | None:
        """Return their share of all cores since the last call; None if that is not known."""
        try:
            with STAT.open("rb") as stream:
                ticks = [int(word) for word in stream.readline().split()[1:9]]
            all_ticks = sum(ticks)
            now = all_ticks, all_ticks - ticks[3] - ticks[4], time.process_time()  # idle, waiting for a disk
        except (OSError, ValueError, IndexError):
            return None
        earlier, self._earlier = self._earlier, now
        if earlier is None or now[0] <= earlier[0]:
            return None
        own = (now[2] - earlier[2]) * os.sysconf("SC_CLK_TCK")
        return round(min(1.0, max(0.0, (now[1] - earlier[1] - own) / (now[0] - earlier[0]))), 3)


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
