"""The windows of a recording: warm-up, clean timing, trace, memory, and free running."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

WARMUP = "warmup"
CLEAN = "clean"
TRACE_WARMUP = "trace_warmup"
TRACE = "trace"
MEMORY = "memory"
FREE = "free"
TRIGGERED = "triggered"  # a step of a window with a recording of its own

TITLES = {
    WARMUP: "warm-up",
    CLEAN: "clean timing",
    TRACE_WARMUP: "trace",
    TRACE: "trace",
    MEMORY: "memory and FLOPs",
    FREE: "free running",
}
PROGRESS_INTERVAL_NS = 10_000_000_000
# How long a run with --exit-after goes on after its windows: the windows hold up prefetching and periodic work.
LEAST_FREE_STEPS, LEAST_FREE_NS = 20, 1_000_000_000
MOST_FREE_STEPS, MOST_FREE_NS = 300, 15_000_000_000


def has_settled(num_free: int, free_ns: int, num_ranks: int, given: int | None = None) -> bool:
    """Return whether enough steps ran freely to tell the throughput, for --exit-after; as many as `given`, if any."""
    if given is not None:
        return num_free >= given
    if num_ranks > 1:
        return num_free >= LEAST_FREE_STEPS  # ranks must stop at the same step, and only counts are the same
    is_long = num_free >= MOST_FREE_STEPS or free_ns >= MOST_FREE_NS
    return is_long or (num_free >= LEAST_FREE_STEPS and free_ns >= LEAST_FREE_NS)


class WindowsDone(SystemExit):
    """Ends the script after the last window, for `--exit-after`. The exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The number of steps in each window. A window with 0 steps is skipped.

    >>> windows = Windows(warmup=1, clean=2, trace=1, memory=1)
    >>> [windows.at(step) for step in range(7)]
    ['warmup', 'clean', 'clean', 'trace_warmup', 'trace', 'memory', 'free']
    """

    warmup: int = 5
    """Warm-up steps, excluded from timing: first calls, autotuning, compilation."""
    clean: int = 20
    """Steps timed with no profiler, memory history or labels. All step times come from these."""
    trace: int = 2
    """Steps under torch.profiler, after one extra step that warms the profiler up."""
    repeat: int = 1
    """How many times to run the trace window. Each run has its own warm-up step and its own file."""
    trace_slowest: bool = False
    """Of several ranks, only the one that the others wait for takes the trace. All time their steps."""
    memory: int = 1
    """1 or 0: the step in which every op is observed, for FLOPs and the owner of each allocation."""
    free: int | None = None
    """Steps after the others, for --exit-after; None: until the throughput is known."""

    def __post_init__(self) -> None:
        for name in ("warmup", "clean", "trace", "memory"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        if self.free is not None and self.free < 0:
            raise ValueError(f"free is {self.free}: it must be 0 or more")
        if self.repeat < 1:
            raise ValueError(f"repeat is {self.repeat}: it must be 1 or more. Set trace=0 to skip the trace window")
        if self.memory > 1:
            raise ValueError(f"memory is {self.memory}: it must be 0 or 1")

    def at(self, step: int) -> str:
        """Return the window that contains `step`, counted from 0."""
        return self._locate(step)[0]

    def num_left(self, step: int) -> int:
        """Return the number of steps left in the window of `step`. A trace includes its warm-up step."""
        name, num_left = self._locate(step)
        return num_left + (self.trace if name == TRACE_WARMUP else 0)

    def _locate(self, step: int) -> tuple[str, int]:
        for name, num_steps in self.sequence:
            if step < num_steps:
                return name, num_steps - step
            step -= num_steps
        return FREE, 0

    @cached_property
    def sequence(self) -> list[tuple[str, int]]:
        """The windows in order with their step counts, without free running."""
        return [
            (WARMUP, self.warmup),
            (CLEAN, self.clean),
            *[(TRACE_WARMUP, 1 if self.trace else 0), (TRACE, self.trace)] * self.repeat,
            (MEMORY, self.memory),
        ]

    def counts(self) -> dict[str, int]:
        """Return the total number of steps of each window.

        >>> Windows(trace=2, repeat=3).counts()
        {'warmup': 5, 'clean': 20, 'trace_warmup': 3, 'trace': 6, 'memory': 1}
        """
        totals: dict[str, int] = {}
        for name, num_steps in self.sequence:
            totals[name] = totals.get(name, 0) + num_steps
        return totals

    @cached_property
    def num_steps(self) -> int:
        """The number of steps before free running begins."""
        return sum(self.counts().values())


class Progress:
    """Prints a line when a window begins, and now and then in between."""

    def __init__(self, windows: Windows, exits: bool, write: Callable[[str], None]) -> None:
        self._windows, self._exits, self._write = windows, exits, write
        self._last_ns = time.perf_counter_ns()

    def step_ended(self, num_steps: int, wall_ns: int, window: str, entered: bool) -> None:
        """Report after `num_steps` steps, the last of `wall_ns`, in the window that the next one belongs to."""
        is_new = entered and window not in (WARMUP, TRACE)
        now = time.perf_counter_ns()
        if not is_new and now - self._last_ns < PROGRESS_INTERVAL_NS:
            return
        self._last_ns = now
        title, seconds = TITLES[window], wall_ns / 1e9
        if window != FREE:
            num_left = self._windows.num_left(num_steps)
            # A first step compiles, allocates and tunes: no later step takes as long.
            left = f"about {num_left * seconds:.1f} s" if num_steps > 1 else f"the first took {seconds:.1f} s"
            self._write(f"{title}: {num_left} step(s), {left}" if num_steps else f"{title}: {num_left} step(s)")
        elif is_new and self._exits:
            num = LEAST_FREE_STEPS if self._windows.free is None else self._windows.free
            self._write(f"all windows done; the script stops after {num} more step(s), for the throughput")
        elif is_new:
            self._write("all windows done; the script continues (--exit-after would stop it)")
        else:
            self._write(f"{title}: {num_steps} steps so far, the last took {seconds:.3f} s")
