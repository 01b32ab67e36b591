"""What NVML saw while the clean steps ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis.statistics import quantile
from stepscope.trace.recording import CounterSample


@dataclass(frozen=True)
class Gauge:
    """Mean and 95th percentile of one counter."""

    mean: float
    p95: float


@dataclass(frozen=True)
class CounterSummary:
    """Counters over the clean steps; a counter that the device does not offer is None."""

    num_samples: int
    gpu_busy_share: Gauge | None
    """Share of the sampling period in which some kernel ran: not how full the GPU was."""
    memory_controller_busy_share: Gauge | None
    power_watts: Gauge | None
    sm_clock_mhz: Gauge | None
    memory_clock_mhz: Gauge | None
    throttle_shares: tuple[tuple[str, float], ...]
    """Reason and share of samples, idleness left out."""
    joules: float | None
    """Energy of the window: from the energy counter scaled to it, else mean power × time."""


def summarise_counters(samples: Sequence[CounterSample], start_ns: int, end_ns: int) -> CounterSummary | None:
    """The counters between two moments; None when no sample lies there."""
    inside = [sample for sample in samples if start_ns <= sample.t_ns <= end_ns]
    if not inside:
        return None

    def gauge(name: str) -> Gauge | None:
        values = sorted(float(value) for s in inside if (value := getattr(s, name)) is not None)
        return Gauge(sum(values) / len(values), quantile(values, 0.95)) if values else None

    reasons = sorted({reason for sample in inside for reason in sample.throttle if reason != "gpu_idle"})
    power = gauge("power_watts")
    joules = None
    # The energy counter is slow to read and is sampled seldom; power at every sample stands in.
    metered = [(s.t_ns, s.energy_joules) for s in inside if s.energy_joules is not None]
    if len(metered) >= 2:
        (first_ns, first), (last_ns, last) = metered[0], metered[-1]
        joules = (last - first) * (end_ns - start_ns) / (last_ns - first_ns)
    elif power is not None:
        joules = power.mean * (end_ns - start_ns) / 1e9
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
