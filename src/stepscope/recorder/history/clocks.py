"""The clocks of the machine: what time of day a moment was, and whether the machine slept or its clock was set."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

LEAST_NS = 1_000_000_000  # that a clock must change to be worth a word
_APART_NS, _MOST_READS = 100_000, 10


def readings() -> tuple[int, int, int]:
    """Return now in ns: on the clock that steps are timed with, since the boot with sleep, and of the day.

    They are read again if the process was interrupted in between.
    """
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    for _ in range(_MOST_READS):
        now_ns = time.perf_counter_ns()
        boot_ns, day_ns = now_ns if boot is None else time.clock_gettime_ns(boot), time.time_ns()
        if time.perf_counter_ns() - now_ns < _APART_NS:
            break
    return now_ns, boot_ns, day_ns


class Clocks:
    """Relates the clocks to each other, as they were when `changes` was last called."""

    def __init__(self) -> None:
        now_ns, boot_ns, day_ns = self._read()
        self._slept_ns, self._set_ns, self._day_ns = boot_ns - now_ns, day_ns - boot_ns, day_ns - now_ns

    def _read(self) -> tuple[int, int, int]:
        return readings()

    def now_ns(self) -> int:
        return self._read()[0]

    def unix(self, ns: int) -> float:
        """Return the Unix time, in seconds, of a moment."""
        return round((ns + self._day_ns) / 1e9, 3)

    def changes(self) -> Iterator[tuple[str, int, float]]:
        """Yield what happened to the clocks since the last call: what, ns without a sign, seconds with one."""
        now_ns, boot_ns, day_ns = self._read()
        slept_ns, set_ns = boot_ns - now_ns, day_ns - boot_ns
        self._day_ns = day_ns - now_ns
        found = ("suspended", slept_ns - self._slept_ns), ("clock_jump", set_ns - self._set_ns)
        # Small differences add up to nothing: the time of day is adjusted all the time.
        self._slept_ns, self._set_ns = slept_ns, set_ns
        for kind, ns in found:
            if abs(ns) >= LEAST_NS:
                yield kind, abs(ns), round(ns / 1e9, 3)


def process_began() -> float | None:
    """Return the Unix time at which this process began; None where that is not known."""
    try:
        with Path("/proc/self/stat").open(encoding="utf-8", errors="replace") as stream:
            ticks = int(stream.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, ValueError, IndexError, AttributeError):
        return None
