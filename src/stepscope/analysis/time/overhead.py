"""What a profiler adds to host time, and how much slower the host was while it ran."""

from dataclasses import dataclass

import polars as pl

from stepscope.analysis.structure.nesting import matches

PROFILER_SHARE = 0.32
"""Share of host time that the profiler needs to record ops and calls with shapes and memory, from traces whose clean
step is known (docs/whatif.md). It is a share because a slow host records slowly too."""
MOST_SLOWER = 0.5
"""The most of the rest that a clean step may do without: a shared host may be twice as fast a second later."""
_RECORDED = ["op", "runtime", "driver", "python"]
_TRITON = "^triton_"
_TRITON_EVENTS = 10
"""What the launch of a kernel of torch.compile costs under a profiler, in recorded events: its launcher first gathers
the kernel's arguments and settings in Python."""


@dataclass(frozen=True)
class Overhead:
    """What to subtract from a trace's host time for that of a clean step; nothing by default."""

    ns_per_event: float = 0.0  # per event that the profiler recorded
    factor: float = 1.0  # of the rest that is left, where the host was slower in the trace


NOTHING = Overhead()


def recorded_ns(host: pl.DataFrame) -> pl.Series:
    """Return the times of recorded events, sorted; those that cost as much as several come as often."""
    is_triton = (host["kind"] == "op") & matches(host["name"], _TRITON)
    times = host["start_ns"].filter(host["kind"].is_in(_RECORDED))
    again = [host["start_ns"].filter(is_triton)] * (_TRITON_EVENTS - 1)
    recorded: pl.Series = pl.concat([times, *again]).sort()
    return recorded
