"""Periodic slow steps, and steps before times have settled."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from stepscope.analysis.time.loop_time import BETWEEN
from stepscope.analysis.time.phases import phase_of
from stepscope.analysis.time.statistics import quantile
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
    """Steps that take much longer than the others."""

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
        for rest, _ in Counter(step % period for step in outliers).most_common(_MOST_TRIED):
            members = {step for step in steps if step % period == rest}
            if len(members) < 2 or not members <= outliers:
                continue
            rate = (len(outliers - members) + 1) / len(steps)
            if num_possible * rate ** len(members) <= _BY_CHANCE:
                return period, members
    return None, set()


def _phase(clean: Sequence[StepSample], slow: set[int]) -> str | None:
    """Return the phase with most of the slow steps' excess."""
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
