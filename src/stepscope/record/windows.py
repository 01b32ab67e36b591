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
    memory: int = 1
    """1 or 0: the step in which every op is seen, for FLOPs and for what each allocation belongs to."""

    def __post_init__(self) -> None:
        for name in ("warmup", "clean", "trace", "memory"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: a window has 0 or more steps")
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
            (TRACE_WARMUP, 1 if self.trace else 0),
            (TRACE, self.trace),
            (MEMORY, self.memory),
        ]

    def first_step(self, window: str) -> int:
        """The index of a window's first step; of free running for a window that is left out."""
        first = 0
        for name, num_steps in self.sequence():
            if name == window and num_steps:
                break
            first += num_steps
        return first

    def num_steps_of(self, window: str) -> int:
        """Steps of one window; the trace's warm-up counts as a part of the trace."""
        steps = dict(self.sequence())
        return steps[TRACE_WARMUP] + steps[TRACE] if window == TRACE_WARMUP else steps[window]

    @property
    def num_steps(self) -> int:
        """Steps until free running begins."""
        return sum(num_steps for _, num_steps in self.sequence())
