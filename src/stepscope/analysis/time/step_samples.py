"""Every step of a recording on one clock, those that took much longer than the others, and how they are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepscope.analysis.time.phases import UNATTRIBUTED, phase_of
from stepscope.analysis.time.statistics import quantile
from stepscope.trace.recording import Recording, StepSample

FENCE = 3.0
"""Inter-quartile ranges above the third quartile: Tukey's outer fence."""
LEAST_EXCESS_SHARE = 0.05
"""Of the median: a step that is less above it is no outlier, however alike the others are."""
FEWEST = 8
_MOST_BINS = 12


@dataclass(frozen=True)
class TimedStep:
    """A step with its phases."""

    sample: StepSample
    clock: str
    """`device` (between CUDA events) or `host`: which one the times are read from."""
    step_ns: int
    phases_ns: Mapping[str, int]
    """By phase; sums to `step_ns`. A free running step is not looked into: all of it is `unattributed`."""


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than the others."""

    step: TimedStep
    excess_ns: float
    """Above the median of the steps it is compared with."""
    phase: str | None
    """The phase that grew most, against its median over those steps; None where phases were not looked at."""
    phase_excess_ns: float | None


@dataclass(frozen=True)
class Bin:
    """Some of the samples: those from `low` on and below `high`, the last with its end."""

    low: float
    high: float
    num: int


def timed_steps(recording: Recording, clock: str | None) -> list[TimedStep]:
    """Every step in order. On the device's clock (`Summary.clock`) a step without a device side has the host's."""
    belongs = phase_of(recording.window("clean") or recording.samples)
    found = []
    for sample in recording.samples:
        on_device = clock == "device" and sample.device_ns is not None
        stretches = (sample.device_ns or {}) if on_device else sample.host_ns
        phases: dict[str, int] = {}
        for label, ns in stretches.items():
            name = UNATTRIBUTED if label == UNATTRIBUTED else belongs.get(label, "other")
            phases[name] = phases.get(name, 0) + ns
        step_ns = sum(stretches.values()) if on_device else sample.wall_ns
        found.append(TimedStep(sample, "device" if on_device else "host", step_ns, phases))
    return found


def outliers(steps: Sequence[TimedStep]) -> list[Outlier]:
    """The clean steps above the outer fence of all clean ones, and the free ones above theirs, most excess first.

    Fewer than 8 have no fence. Steps that compiled are looked at, and are not what others are compared with. The free
    steps count where all is on the host's clock, for a host that runs ahead of a GPU waits in some step or other; but
    for the first, in which the windows' findings are written.
    """
    clean = [step for step in steps if step.sample.window == "clean"]
    free = [step for step in steps if step.sample.window == "free"][1:]
    found = _above_fence(clean)
    if not any(step.clock == "device" for step in clean):
        found += _above_fence(free)
    return sorted(found, key=lambda outlier: -outlier.excess_ns)


def _above_fence(steps: Sequence[TimedStep]) -> list[Outlier]:
    usual = [step for step in steps if not step.sample.num_compiles] or steps
    if len(usual) < FEWEST:
        return []
    times = sorted(float(step.step_ns) for step in usual)
    middle, third = quantile(times, 0.5), quantile(times, 0.75)
    limit = max(third + FENCE * (third - quantile(times, 0.25)), (1 + LEAST_EXCESS_SHARE) * middle)
    names = {name for step in usual for name in step.phases_ns}
    phases = {name: median(step.phases_ns.get(name, 0) for step in usual) for name in names}
    found = []
    for step in steps:
        if step.step_ns > limit:
            grown = {name: ns - phases.get(name, 0) for name, ns in step.phases_ns.items() if name != UNATTRIBUTED}
            phase = max(grown, key=lambda name: grown[name]) if grown else None
            found.append(Outlier(step, step.step_ns - middle, phase, grown[phase] if phase is not None else None))
    return found


def histogram(samples: Sequence[float]) -> list[Bin]:
    """Bins of one width from the least to the largest sample, as many as Sturges' rule says, 12 at the most.

    >>> [(bin.low, bin.high, bin.num) for bin in histogram([1.0, 2.0, 2.0, 4.0])]
    [(1.0, 2.0, 1), (2.0, 3.0, 2), (3.0, 4.0, 1)]
    """
    if not samples:
        return []
    low, high = min(samples), max(samples)
    if low == high:
        return [Bin(low, high, len(samples))]
    num_bins = min(_MOST_BINS, math.ceil(math.log2(len(samples))) + 1)
    width = (high - low) / num_bins
    nums = [0] * num_bins
    for value in samples:
        nums[min(num_bins - 1, int((value - low) / width))] += 1
    return [Bin(low + width * i, low + width * (i + 1), num) for i, num in enumerate(nums)]
