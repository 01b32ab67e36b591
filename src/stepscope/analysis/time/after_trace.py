"""What a trace on a GPU leaves behind: the profiler's driver library stays attached, and every launch costs more.

Steps that run freely after a trace are longer than they would be without Stepscope if the host is the bottleneck.
What they take longer belongs to the measurement.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from stepscope.analysis.time.statistics import quantile
from stepscope.trace.recording import Recording, StepSample

MOST_LAUNCH_NS = 15_000  # that a launch costs more; up to 10 µs were measured on hosts of H200s
MOST_COPY_NS = 300_000  # the same of a copy from or to the host; 195 µs were measured, of 0.7 MB to pageable memory
FEWEST = 8  # steps before and after
_STANDARD_ERRORS = 3.0
_QUARTILES = 1.35  # standard deviations between the quartiles of a normal distribution
_MEDIAN = 1.25  # standard errors of the mean in one of the median
_PASSES, _OTHER = "unattributed", "other"  # of a free step


def launch_cost_ns(recording: Recording, own_ns: Callable[[StepSample], int]) -> int:
    """Return by how much a step after the trace is longer; 0 if it is not, or by more than launches can cost.

    `own_ns` is a step's time without its wait for data and what lies between steps.
    """
    trace = recording.facts.get("trace") or {}
    most_ns = (trace.get("num_kernels") or 0) * MOST_LAUNCH_NS + (trace.get("num_host_copies") or 0) * MOST_COPY_NS
    most_ns /= max(1, trace.get("num_steps") or 1)
    traced = [sample.step for sample in recording.samples if sample.window == "trace"]
    if not most_ns or not traced:
        return 0
    quiet = [sample for sample in recording.samples if not sample.num_compiles]
    before = [sample for sample in quiet if sample.window == "clean" and sample.step < traced[0]]
    after = [sample for sample in quiet if sample.window == "free" and sample.step > traced[-1]]
    if min(len(before), len(after)) < FEWEST:
        return 0
    work = median(_work(sample) for sample in (*before, *after))
    times = [sorted(own_ns(sample) * work / _work(sample) for sample in some) for some in (before, after)]
    longer = median(times[1]) - median(times[0])
    error = sum((_MEDIAN * _spread(each)) ** 2 / len(each) for each in times) ** 0.5
    return round(longer) if longer <= most_ns and longer > _STANDARD_ERRORS * error else 0


def without_launch_cost(recording: Recording, cost_ns: int) -> Recording:
    """Return a recording whose free steps after the trace begin later, by what launches cost more."""
    if not cost_ns:
        return recording
    last = max(sample.step for sample in recording.samples if sample.window == "trace")
    samples = [_shorter(s, cost_ns) if s.window == "free" and s.step > last else s for s in recording.samples]
    return replace(recording, samples=tuple(samples))


def _shorter(sample: StepSample, cost_ns: int) -> StepSample:
    host_ns, left = dict(sample.host_ns), cost_ns
    for part in (_PASSES, _OTHER):
        less = min(left, host_ns.get(part, 0))
        if less:
            host_ns[part] -= less
            left -= less
    less = cost_ns - left
    return replace(sample, start_ns=sample.start_ns + less, wall_ns=sample.wall_ns - less, host_ns=host_ns)


def _work(sample: StepSample) -> int:
    return sample.num_tokens or sample.num_samples or 1


def _spread(ordered: Sequence[float]) -> float:
    return (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / _QUARTILES
