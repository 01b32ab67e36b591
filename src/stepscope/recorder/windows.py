"""Which steps are warm-up, clean timing, traced, measured for memory, and free."""

from __future__ import annotations

from dataclasses import dataclass

WARMUP = "warmup"
CLEAN = "clean"
TRACE_WARMUP = "trace_warmup"
TRACE = "trace"
MEMORY = "memory"
FREE = "free"

TITLES = {
    WARMUP: "warm-up",
    CLEAN: "clean timing",
    TRACE_WARMUP: "trace",
    TRACE: "trace",
    MEMORY: "memory and FLOPs",
    FREE: "free running",
}


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How many steps each window has; a window of 0 steps is left out.

    >>> windows = Windows(warmup=1, clean=2, trace=1, memory=1)
    >>> [windows.at(step) for step in range(7)]
    ['warmup', 'clean', 'clean', 'trace_warmup', 'trace', 'memory', 'free']
    """

    warmup: int = 5
    """Steps whose times are kept apart: first calls, autotuning, compilation."""
    clean: int = 20
    """Steps timed with no profiler, no memory history, no labels: the figures come from these."""
    trace: int = 2
    """Steps under torch.profiler, after one more that only warms the profiler up."""
    repeat: int = 1
    """How often the trace window comes, each time with its warm-up, and with a file of its own."""
    memory: int = 1
    """1 or 0: the step in which every op is seen, for FLOPs and for what each allocation belongs to."""

    def __post_init__(self) -> None:
        for name in ("warmup", "clean", "trace", "memory"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: a window has 0 or more steps")
        if self.repeat < 1:
            raise ValueError(f"repeat is {self.repeat}: the trace window comes once or more; trace=0 leaves it out")
        if self.memory > 1:
            raise ValueError(f"memory is {self.memory}: the memory window is one step or none")

    def at(self, step: int) -> str:
        """The window that `step` belongs to, counted from 0."""
        for name, num_steps in self.sequence():
            if step < num_steps:
                return name
            step -= num_steps
        return FREE

    def sequence(self) -> list[tuple[str, int]]:
        """The windows in order with their step counts, without the endless last one."""
        return [
            (WARMUP, self.warmup),
            (CLEAN, self.clean),
            *[(TRACE_WARMUP, 1 if self.trace else 0), (TRACE, self.trace)] * self.repeat,
            (MEMORY, self.memory),
        ]

    def counts(self) -> dict[str, int]:
        """All steps of each window.

        >>> Windows(trace=2, repeat=3).counts()
        {'warmup': 5, 'clean': 20, 'trace_warmup': 3, 'trace': 6, 'memory': 1}
        """
        totals: dict[str, int] = {}
        for name, num_steps in self.sequence():
            totals[name] = totals.get(name, 0) + num_steps
        return totals

    def num_left(self, step: int) -> int:
        """Steps until the window of `step` is over; the trace's warm-up counts as a part of the trace."""
        for name, num_steps in self.sequence():
            if step < num_steps:
                return num_steps - step + (self.trace if name == TRACE_WARMUP else 0)
            step -= num_steps
        return 0

    @property
    def num_steps(self) -> int:
        """Steps until free running begins."""
        return sum(num_steps for _, num_steps in self.sequence())
