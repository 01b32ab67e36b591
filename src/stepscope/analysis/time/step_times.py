"""Times of single steps: outliers, periodic slow steps, and steps before times have settled."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from stepscope.analysis.time.loop_time import BETWEEN
from stepscope.analysis.time.phases import UNATTRIBUTED, phase_of
from stepscope.analysis.time.statistics import Distribution, describe, quantile
from stepscope.trace.recording import Recording, StepSample

_OUTLIER = 1.5  # of the median; steps above it are outliers
_BY_CHANCE = 0.01  # probability that random outliers look periodic
_IN_ONE_PHASE = 0.8  # share of the excess that must be in one phase to name it
_FEWEST_STEPS, _FEWEST_UNSETTLED = 8, 3
_UNSETTLED = 1.1
_LATE_SHARE = 0.15
_MOST_TRIED = 8


@dataclass(frozen=True)
class SlowSteps:
    """Slow steps at regular distances."""

    num_steps: int  # steps examined
    median_ns: float
    slow: tuple[tuple[int, int], ...]  # the slow steps: number and duration
    excess_ns: float  # their time above the median, averaged over all steps
    period: int  # steps from one to the next
    phase: str | None  # the phase with most of the excess, if phases were measured


@dataclass(frozen=True)
class Settling:
    """Clean steps that were still getting faster."""

    num_steps: int
    num_unsettled: int
    first_ns: float
    settled_ns: float  # the median of the second half
    mean_ns: float


def slow_steps(recording: Recording) -> SlowSteps | None:
    """Return slow steps at a regular interval; None if there are none or it may be chance.

    On a GPU, device time of clean steps; otherwise host time of clean and free steps, since a host ahead of the GPU
    has slow steps that cost nothing.
    """
    clean = [sample for sample in recording.window("clean") if not sample.num_compiles]
    if not clean:
        return None
    on_device = any(sample.device_ns is not None for sample in clean)
    # The first free step of older recordings still writes the results of the windows.
    samples = clean if on_device else [*clean, *recording.window("free")[1:]]
    times = {sample.step: _step_ns(sample, on_device) for sample in samples}
    if len(times) < _FEWEST_STEPS or None in times.values():
        return None
    known = {step: ns for step, ns in times.items() if ns is not None}
    middle = float(median(known.values()))
    outliers = {step: ns for step, ns in known.items() if ns > _OUTLIER * middle}
    period, chosen = _period(set(outliers), set(known))
    if period is None:
        return None
    excess = sum(known[step] - middle for step in chosen) / len(known)
    slow = tuple((step, known[step]) for step in sorted(chosen))
    return SlowSteps(len(known), middle, slow, excess, period, _phase(clean, chosen))


def settling(recording: Recording) -> Settling | None:
    """Return clean steps at the beginning that were slower than the rest; None if there are none or too few."""
    clean = [sample for sample in recording.window("clean") if not sample.num_compiles]
    on_device = bool(clean) and all(sample.device_ns is not None for sample in clean)
    times = [_step_ns(sample, on_device) or 0 for sample in clean]
    if len(times) < _FEWEST_STEPS:
        return None
    settled = float(median(times[len(times) // 2 :]))
    limit = max(_UNSETTLED * settled, quantile(sorted(map(float, times[len(times) // 2 :])), 0.9))
    num = next((i for i, ns in enumerate(times) if ns <= limit), len(times))
    late = sum(ns > limit for ns in times[num:])
    if (
        num < max(_FEWEST_UNSETTLED, len(times) // 10)
        or num > len(times) // 2
        or late > _LATE_SHARE * (len(times) - num)
    ):
        return None
    return Settling(len(times), num, float(times[0]), settled, sum(times) / len(times))


def _step_ns(sample: StepSample, on_device: bool) -> int | None:
    """Return the time of the step without what lies between steps, which has owners of its own."""
    times = sample.device_ns if on_device else sample.host_ns
    return None if times is None else sum(ns for name, ns in times.items() if name not in BETWEEN)


def _period(outliers: set[int], steps: set[int]) -> tuple[int | None, set[int]]:
    """Return the shortest period whose steps are all slow, and those steps; None if it may be chance."""
    distances = Counter(later - earlier for earlier, later in pairwise(sorted(outliers)))
    for period in sorted(distance for distance, _ in distances.most_common(_MOST_TRIED)):
        if not 2 <= period <= (max(steps) - min(steps)) // 2:
            continue
        num_possible = period * (period + 1) / 2  # every shorter period could have been found instead
        num_of_rest = Counter(step % period for step in steps)
        for rest, num_slow in Counter(step % period for step in outliers).most_common(_MOST_TRIED):
            if num_slow < 2 or num_slow < num_of_rest[rest]:
                continue
            rate = (len(outliers) - num_slow + 1) / len(steps)
            if num_possible * rate**num_slow <= _BY_CHANCE:
                return period, {step for step in outliers if step % period == rest}
    return None, set()


def _phase(clean: Sequence[StepSample], slow: set[int]) -> str | None:
    belongs = phase_of(clean)

    def mean(samples: Sequence[StepSample]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for sample in samples:
            for label, ns in sample.host_ns.items():
                if label in BETWEEN:
                    continue
                name = belongs.get(label, "other")
                sums[name] = sums.get(name, 0.0) + ns / len(samples)
        return sums

    inside = [sample for sample in clean if sample.step in slow]
    outside = [sample for sample in clean if sample.step not in slow]
    if not inside or not outside:
        return None
    usual = mean(outside)
    excess = {name: ns - usual.get(name, 0.0) for name, ns in mean(inside).items()}
    name, most = max(excess.items(), key=lambda item: item[1])
    return name if most >= _IN_ONE_PHASE * sum(max(0.0, ns) for ns in excess.values()) else None


FENCE = 3.0  # inter-quartile ranges above the third quartile: Tukey's outer fence
LEAST_EXCESS_SHARE = 0.05  # smaller excesses over the median are not outliers, however similar the other steps are
FEWEST = 8
_MOST_BINS = 12


@dataclass(frozen=True)
class TimedStep:
    """A step and its time on one clock."""

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


PASSES = {
    "forward": ("forward",),
    "forward+backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}
"""Parts of a pass."""


@dataclass(frozen=True)
class WarmUp:
    """How many first passes are slower than the rest."""

    what: str  # A name in PASSES
    num_warmup: int
    time: Distribution  # nanoseconds of the passes after the warm-up


def by_warmup(
    samples_phase_ns: Mapping[str, Sequence[int]], num_samples: int, counts: Sequence[int]
) -> Iterator[WarmUp]:
    """Return the times of the passes after each number of warm-up passes, if the run is long enough.

    `samples_phase_ns` is a row's: by phase one entry per pass, the first call first.

    >>> found = list(by_warmup({"forward": [90, 10, 11, 12]}, 2, (0, 2)))
    >>> [(each.what, each.num_warmup, each.time.mean) for each in found]
    [('forward', 0, 50.0), ('forward', 2, 11.5)]
    """
    for what, phases in PASSES.items():
        if not all(phase in samples_phase_ns for phase in phases):
            continue
        passes = [sum(times) for times in zip(*(samples_phase_ns[phase] for phase in phases))]
        for count in counts:
            samples = passes[count : count + num_samples]
            if len(samples) == num_samples:
                yield WarmUp(what, count, describe(samples))
