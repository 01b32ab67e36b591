"""NVML counters during the clean steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis.time.statistics import quantile
from stepscope.trace.recording import CounterSample


@dataclass(frozen=True)
class Gauge:
    """Mean and 95th percentile of one counter."""

    mean: float
    p95: float


@dataclass(frozen=True)
class CounterSummary:
    """Counters over the clean steps; unsupported counters are None."""

    num_samples: int
    gpu_busy_share: Gauge | None  # share of the sampling period in which any kernel ran; not how full the GPU was
    memory_controller_busy_share: Gauge | None
    power_watts: Gauge | None
    sm_clock_mhz: Gauge | None
    memory_clock_mhz: Gauge | None
    throttle_shares: tuple[tuple[str, float], ...]  # reason and share of samples, without idleness
    joules: float | None
    """Energy of the clean steps: mean power (from the energy counter if read close by) × their time."""


def summarize_counters(
    samples: Sequence[CounterSample], intervals: Sequence[tuple[int, int]]
) -> CounterSummary | None:
    """Return the counters during steps given as ordered (start, end) pairs; None without samples."""
    starts = [start for start, _ in intervals]

    def is_inside(t_ns: int) -> bool:
        position = bisect_right(starts, t_ns) - 1
        return position >= 0 and t_ns <= intervals[position][1]

    inside = [sample for sample in samples if is_inside(sample.t_ns)]
    if not inside:
        return None

    def gauge(name: str) -> Gauge | None:
        values = sorted(float(value) for s in inside if (value := getattr(s, name)) is not None)
        return Gauge(sum(values) / len(values), quantile(values, 0.95)) if values else None

    reasons = sorted({reason for sample in inside for reason in sample.throttle if reason != "gpu_idle"})
    power = gauge("power_watts")
    seconds = sum(end - start for start, end in intervals) / 1e9
    watts = _metered_watts(samples, intervals[0][0], intervals[-1][1])
    joules = None
    if watts is not None:
        joules = watts * seconds
    elif power is not None:
        joules = power.mean * seconds
    return CounterSummary(
        num_samples=len(inside),
        gpu_busy_share=gauge("gpu_busy_share"),
        memory_controller_busy_share=gauge("memory_controller_busy_share"),
        power_watts=power,
        sm_clock_mhz=gauge("sm_clock_mhz"),
        memory_clock_mhz=gauge("memory_clock_mhz"),
        throttle_shares=tuple(
            (reason, sum(reason in s.throttle for s in inside) / len(inside)) for reason in reasons
        ),
        joules=joules,
    )


def _metered_watts(samples: Sequence[CounterSample], start_ns: int, end_ns: int) -> float | None:
    """Return mean power between two moments from the energy counter, if it was read close to both."""
    slack_ns = (end_ns - start_ns) // 4
    readings = [(s.t_ns, s.energy_joules) for s in samples if s.energy_joules is not None]
    near_start = [reading for reading in readings if abs(reading[0] - start_ns) <= slack_ns]
    near_end = [reading for reading in readings if abs(reading[0] - end_ns) <= slack_ns]
    if not near_start or not near_end:
        return None
    first_ns, first = min(near_start, key=lambda reading: abs(reading[0] - start_ns))
    last_ns, last = min(near_end, key=lambda reading: abs(reading[0] - end_ns))
    return (last - first) / ((last_ns - first_ns) / 1e9) if last_ns > first_ns else None
