"""All steps of a recording on one clock, outliers, and their distribution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepscope.analysis.time.phases import UNATTRIBUTED, phase_of
from stepscope.analysis.time.statistics import quantile
from stepscope.trace.recording import Recording, StepSample

FENCE = 3.0  # inter-quartile ranges above the third quartile: Tukey's outer fence
LEAST_EXCESS_SHARE = 0.05  # smaller excesses over the median are not outliers, however similar the other steps are
FEWEST = 8
_MOST_BINS = 12


@dataclass(frozen=True)
class TimedStep:
    """A step with its phases."""

    sample: StepSample
    clock: str  # `device` (between CUDA events) or `host`
    step_ns: int
    phases_ns: Mapping[str, int]  # by phase; adds up to `step_ns`. Free-running steps have only `unattributed`.


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than the others."""

    step: TimedStep
    excess_ns: float  # above the median of the compared steps
    phase: str | None  # the phase that grew most over its median; None if phases were not measured
    phase_excess_ns: float | None


@dataclass(frozen=True)
class Bin:
    """Samples from `low` to below `high`; the last bin includes its end."""

    low: float
    high: float
    num: int


def timed_steps(recording: Recording, clock: str | None) -> list[TimedStep]:
    """Return every step in order. On the device clock (`Summary.clock`), steps without one have host times."""
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
    """Return clean steps above the outer fence of all clean ones, and free ones above theirs, the largest excess
    first.

    Fewer than 8 steps have no fence. Steps that compiled can be outliers but are not compared with. Free steps count
    only on the host clock, since a host ahead of the GPU waits in arbitrary steps; the first free step is excluded
    because the results of the windows are written in it.
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
    """Return bins of equal width by Sturges' rule, at most 12.

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
