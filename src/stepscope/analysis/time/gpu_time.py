"""GPU time: computing, communicating, copying, idle; exact to the nanosecond."""

from dataclasses import asdict, dataclass

import polars as pl

from stepscope.analysis.structure.intervals import spans, sweep
from stepscope.analysis.structure.nesting import matches

COMMUNICATION_NAMES = "(?i)nccl|rccl"  # NCCL and RCCL kernels: communication in `docs/accounting.md`
_ACTIVITIES = ("compute", "communication", "memory")


@dataclass(frozen=True)
class GpuTime:
    """One window of GPU time, in nanoseconds.

    The window runs from the first GPU event's start to the last one's end, over kernels, copies and fills. `busy_ns +
    idle_ns == window_ns` and `compute_ns + exposed_communication_ns + exposed_memory_ns == busy_ns`.
    """

    window_ns: int = 0
    busy_ns: int = 0  # something ran
    idle_ns: int = 0  # nothing ran
    compute_ns: int = 0  # A kernel that is not communication ran
    communication_ns: int = 0  # an NCCL or RCCL kernel ran
    memory_ns: int = 0  # A copy or a fill ran
    exposed_communication_ns: int = 0  # communication ran but no other kernel
    exposed_memory_ns: int = 0  # A copy or fill ran but no kernel
    overlapped_communication_ns: int = 0  # communication ran during computing

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def with_activity(device: pl.DataFrame) -> pl.DataFrame:
    """Return device events with `activity`: `compute`, `communication` or `memory`."""
    is_communication = pl.when(matches(device["name"], COMMUNICATION_NAMES)).then(pl.lit("communication"))
    activity = pl.when(pl.col("kind") != "kernel").then(pl.lit("memory")).otherwise(is_communication)
    return device.with_columns(activity.fill_null("compute").cast(pl.Enum(_ACTIVITIES)).alias("activity"))


def timeline(device: pl.DataFrame) -> pl.DataFrame:
    """Return the GPU's window cut wherever computing, communicating or copying begins or ends (`intervals.sweep`)."""
    labeled = device if "activity" in device.columns else with_activity(device)
    return sweep({name: spans(labeled, pl.col("activity") == name) for name in _ACTIVITIES})


def gpu_time(device: pl.DataFrame) -> GpuTime:
    return account(timeline(device), device)


def account(stretches: pl.DataFrame, device: pl.DataFrame) -> GpuTime:
    """Return the account of a timeline; events of zero length count for the window too."""
    if device.is_empty():
        return GpuTime()
    ends = device["start_ns"] + device["duration_ns"]
    window = int(ends.max()) - int(device["start_ns"].min())  # type: ignore[arg-type]  # numbers
    length = pl.col("end_ns") - pl.col("start_ns")
    compute, communication, memory = pl.col("compute"), pl.col("communication"), pl.col("memory")
    parts = {
        "busy_ns": compute | communication | memory,
        "compute_ns": compute,
        "communication_ns": communication,
        "memory_ns": memory,
        "exposed_communication_ns": communication & ~compute,
        "exposed_memory_ns": memory & ~compute & ~communication,
        "overlapped_communication_ns": communication & compute,
    }
    sums = stretches.select(length.filter(where).sum().alias(name) for name, where in parts.items())
    figures = sums.row(0, named=True)
    return GpuTime(window_ns=window, idle_ns=window - figures["busy_ns"], **figures)
