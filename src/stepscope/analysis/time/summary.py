"""Summary of a recording: step time, distance from the limit, where time goes, and NVML counters."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.analysis.costs.flops import StepFlops, Utilization, step_flops, utilization
from stepscope.analysis.time.loop_time import LoopTime, loop_time, measured_steps
from stepscope.analysis.time.phases import UNATTRIBUTED, Phase, Row, data_is_named, mean_phases, rows
from stepscope.analysis.time.statistics import Distribution, describe, quantile
from stepscope.devices import Ceilings, Device, find_device, load_ceilings
from stepscope.trace.recording import CounterSample, Recording, StepSample

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


@dataclass(frozen=True)
class ObserverEffect:
    """How much slower a probe's window was than the clean steps."""

    window: str
    ratio: float
    num_steps: int


@dataclass(frozen=True)
class Throughput:
    """Units of work per second of wall-clock time, with what lies between steps."""

    unit: str  # `tokens` or `samples`
    per_step: float
    per_s: float
    joules_per_unit: float | None


@dataclass(frozen=True)
class Summary:
    """Everything the card shows: nanoseconds, bytes and shares, no text."""

    num_steps: int  # steps in the recording, in any window
    num_clean: int  # steps used for the figures
    num_compiling: int  # clean steps that compiled something and were excluded
    clock: str | None  # `device` (between CUDA events) or `host`; the clock of `step_ns`
    step_ns: Distribution | None  # the clean steps on that clock; null if there are none
    host_step_ns: Distribution | None  # the same steps on the host clock; on a GPU, the host may run ahead
    warmup_ns: tuple[int, ...]  # host time of each warm-up step: first calls and compilation
    num_micro_batches: int  # calls of the root module per step; more than 1 with gradient accumulation
    num_skipped: int  # optimizer steps that a GradScaler skipped
    data_is_named: bool
    """Whether `data` is time in a DataLoader or `stepscope.phase("data")`; else it is the time before the forward."""
    throughput: Throughput | None  # null if no model input was seen
    loop: LoopTime | None  # the wall-clock time of the loop; null if no step ended undisturbed
    phases: tuple[Phase, ...]  # of the mean of the middle half of clean steps, by step time
    rows: tuple[Row, ...]  # the step's time; on a GPU with `idle` and `unattributed`
    flops: StepFlops | None  # null if the run ended before the memory and FLOPs window
    mfu: Utilization | None  # model FLOPs utilization; null if the limit for device and dtype is unknown
    hfu: Utilization | None  # hardware FLOPs utilization: executed FLOPs, including recomputation
    parameters: Mapping[str, Any] | None  # as in the recording
    observer_effects: tuple[ObserverEffect, ...]  # one per probe window
    counters: CounterSummary | None  # NVML during the clean steps; null without NVML
    num_kernels_per_step: float | None  # from the trace window; null without a GPU


def summary_of(recording: Recording) -> Summary:
    """Return the summary of a recording, compared with the known limits of its device."""
    name = str((recording.facts.get("environment") or {}).get("device_name"))
    device = find_device(name)
    return summarize(recording, device, load_ceilings(name) if device is None else None)


def summarize(recording: Recording, device: Device | None, ceilings: Ceilings | None) -> Summary:
    """Return the summary of a recording; `device` and `ceilings` are the known limits of its device."""
    timed = recording.window("clean")
    clean = _clean(recording)
    trace: Mapping[str, Any] | None = recording.facts.get("trace")
    on_device = _is_on_device(clean)
    wall = clean_step_ns(recording)
    step_ns = describe(wall) if wall else None
    counters = None
    if clean:
        counters = summarize_counters(recording.counters, [(s.start_ns, s.start_ns + s.wall_ns) for s in clean])
    loop = loop_of(recording)
    throughput = None
    if loop is not None:
        throughput = _throughput(measured_steps(recording, on_device), clean, loop.step_ns, counters)
    flops = _flops(recording, trace)
    phases: list[Phase] = []
    unattributed = 0.0
    if clean:
        busy = None
        if trace and trace.get("num_kernels"):
            by_phase = trace["gpu_busy_ns_by_phase"]
            busy = {name: ns / trace["num_steps"] for name, ns in by_phase.items()}
            unattributed = busy.pop(UNATTRIBUTED, 0.0)
        # The steps between the first and third quartile: typical ones, without outliers.
        ordered = sorted(clean, key=lambda sample: _step_ns(sample, on_device))
        phases = mean_phases(ordered[len(clean) // 4 : len(clean) - len(clean) // 4], busy)
    mfu = hfu = None
    if flops is not None and step_ns is not None:
        mfu = utilization(flops.model_flops_by_dtype, step_ns.median, device, ceilings, "model")
        hfu = utilization(flops.hardware_flops_by_dtype, step_ns.median, device, ceilings, "executed")
    return Summary(
        num_steps=len(recording.samples)
        + recording.num_unread
        + ((recording.facts.get("steps") or {}).get("num_earlier") or 0),
        num_clean=len(clean),
        num_compiling=len(timed) - len(clean),
        clock=("device" if on_device else "host") if clean else None,
        step_ns=step_ns,
        host_step_ns=describe([sample.wall_ns for sample in clean]) if clean else None,
        warmup_ns=tuple(sample.wall_ns for sample in recording.window("warmup")),
        num_micro_batches=max((sample.num_micro_batches for sample in clean or recording.samples), default=0),
        num_skipped=sum(sample.num_skipped for sample in recording.samples),
        data_is_named=data_is_named(clean),
        throughput=throughput,
        loop=loop,
        phases=tuple(phases),
        rows=tuple(rows(phases, unattributed)) if phases else (),
        flops=flops,
        mfu=mfu,
        hfu=hfu,
        parameters=recording.facts.get("parameters"),
        observer_effects=tuple(_observer_effects(recording, step_ns, on_device, loop)),
        counters=counters,
        num_kernels_per_step=trace["num_kernels"] / trace["num_steps"]
        if trace and trace.get("num_kernels")
        else None,
    )


def loop_of(recording: Recording) -> LoopTime | None:
    return loop_time(recording, _is_on_device(_clean(recording)))


def clean_step_ns(recording: Recording) -> tuple[int, ...]:
    """Return the samples behind `Summary.step_ns`, in order, in ns on its clock."""
    clean = _clean(recording)
    on_device = _is_on_device(clean)
    return tuple(_step_ns(sample, on_device) for sample in clean)


def _clean(recording: Recording) -> tuple[StepSample, ...]:
    timed = recording.window("clean")
    # A step that compiled is a one-time cost, unless every step compiles.
    return tuple(sample for sample in timed if not sample.num_compiles) or timed


def _is_on_device(clean: Sequence[StepSample]) -> bool:
    return bool(clean) and all(sample.device_ns is not None for sample in clean)


def _step_ns(sample: StepSample, on_device: bool) -> int:
    return sum((sample.device_ns or {}).values()) if on_device else sample.wall_ns


def _throughput(
    measured: Sequence[StepSample], clean: Sequence[StepSample], step_ns: float, counters: CounterSummary | None
) -> Throughput | None:
    # Old recordings have no batch of the steps after the windows.
    steps = [sample for sample in measured if sample.window != "free" or sample.num_samples] or clean
    for unit in ("tokens", "samples"):
        counts, timed = ([getattr(sample, f"num_{unit}") or 0 for sample in some] for some in (steps, clean))
        if (all(timed) if timed else any(counts)) and step_ns:
            total = sum(timed)
            joules = (
                counters.joules / total if total and counters is not None and counters.joules is not None else None
            )
            per_step = sum(counts) / len(counts)
            return Throughput(unit, per_step, per_step / (step_ns / 1e9), joules)
    return None


def _flops(recording: Recording, trace: Mapping[str, Any] | None) -> StepFlops | None:
    facts = recording.facts.get("flops")
    counted_in = recording.window("memory")
    if not facts or not counted_in:
        return None
    sample = counted_in[-1]
    return step_flops(facts, trace, sample.num_tokens or sample.num_samples)


def _observer_effects(
    recording: Recording, clean: Distribution | None, on_device: bool, loop: LoopTime | None
) -> list[ObserverEffect]:
    effects = []
    for window in ("trace", "memory"):
        samples = recording.window(window)
        if clean is not None and samples:
            # A probed step may lack device times. Its host time replaces them, since the sync at the window's end
            # makes it the whole step.
            values = [_step_ns(s, on_device and s.device_ns is not None) for s in samples]
            effects.append(ObserverEffect(window, describe(values).median / clean.median, len(samples)))
    if clean is not None and loop is not None and loop.launch_cost_ns:
        ratio, num_free = 1 + loop.launch_cost_ns / clean.median, len(recording.window("free"))
        effects.append(ObserverEffect("after the trace", ratio, num_free))
    return effects
