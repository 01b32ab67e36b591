"""NVML counters during the clean steps."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis.time.statistics import quantile
from stepscope.trace.recording import CounterSample

_GAUGES = ("gpu_busy_share", "memory_controller_busy_share", "power_watts", "sm_clock_mhz", "memory_clock_mhz")


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
    gauges = {name: gauge(name) for name in _GAUGES}
    seconds = sum(end - start for start, end in intervals) / 1e9
    watts = _metered_watts(samples, intervals[0][0], intervals[-1][1])
    if watts is None and (power := gauges["power_watts"]) is not None:
        watts = power.mean
    return CounterSummary(
        num_samples=len(inside),
        **gauges,
        throttle_shares=tuple((why, sum(why in s.throttle for s in inside) / len(inside)) for why in reasons),
        joules=None if watts is None else watts * seconds,
    )


def _metered_watts(samples: Sequence[CounterSample], start_ns: int, end_ns: int) -> float | None:
    """Return mean power between two moments from the energy counter, if it was read close to both."""
    readings = [(s.t_ns, s.energy_joules) for s in samples if s.energy_joules is not None]
    if not readings:
        return None
    first_ns, first = min(readings, key=lambda reading: abs(reading[0] - start_ns))
    last_ns, last = min(readings, key=lambda reading: abs(reading[0] - end_ns))
    is_close = max(abs(first_ns - start_ns), abs(last_ns - end_ns)) <= (end_ns - start_ns) // 4
    return (last - first) / ((last_ns - first_ns) / 1e9) if is_close and last_ns > first_ns else None
