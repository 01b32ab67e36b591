"""What the machine leaves to a process: how long its training waits for a CPU core, and the memory that is left."""

from __future__ import annotations

import _thread
import time
from pathlib import Path

SHORTEST_NS = 100_000_000  # between two readings; of less, the share says little


class CoreWait:
    """The share of time in which the thread that trains could run but other threads had the cores (Linux)."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._last: tuple[int, int] | None = None
        self._share: float | None = None

    def of_this_thread(self) -> None:
        """Look at the thread that calls this."""
        self._path = Path(f"/proc/self/task/{_thread.get_native_id()}/schedstat")
        self._last = None

    def share(self) -> float | None:
        """Return the share since the last call; None where the kernel does not count it."""
        if self._path is None:
            return None
        try:
            now_ns, waited_ns = time.perf_counter_ns(), int(self._path.read_bytes().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        if self._last is None:
            self._last = now_ns, waited_ns
        elif now_ns - self._last[0] >= SHORTEST_NS:
            share = (waited_ns - self._last[1]) / (now_ns - self._last[0])
            self._share, self._last = round(min(1.0, max(0.0, share)), 4), (now_ns, waited_ns)
        return self._share


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
