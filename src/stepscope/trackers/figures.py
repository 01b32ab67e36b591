"""The metrics of a recording by the names that trackers show, the same as `recorder/live` gives while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from stepscope.analysis.time.loop_time import BETWEEN
from stepscope.analysis.time.phases import data_is_named
from stepscope.analysis.time.summary import Summary
from stepscope.trace.recording import Recording, StepSample, began_s
from stepscope.trackers.tracker import Point

PREFIX = "stepscope/"
OF_STEPS = f"{PREFIX}per_step/"
FIGURES = {
    "steps": "Steps so far.",
    "step_time_ms": "Mean wall-clock time per step in milliseconds, with what the loop does between steps.",
    "tokens_per_second": "Tokens per second of wall-clock time.",
    "samples_per_second": "Samples per second of wall-clock time.",
    "mfu": "Model FLOPs utilization: model FLOPs per step / step time / peak FLOP/s of the device, from 0 to 1.",
    "goodput": "Share of training in the wall-clock time of the loop, from 0 to 1.",
    "timed_peak_memory_gib": "Peak allocated GPU memory in GiB until the end of the timed steps; without a GPU, peak "
    "resident memory of the process.",
}
"""What holds for the run so far, with its definition."""
STEP_VALUES = {
    "time_ms": "Wall-clock time of the step in milliseconds.",
    "tokens_per_second": "Tokens of the step / its wall-clock time.",
    "samples_per_second": "Samples of the step / its wall-clock time.",
    "data_ms": "Time in the DataLoader; without one, time before the forward.",
    "forward_ms": "Time in forward, of steps whose phases were measured. backward_ms and optimizer_ms are alike.",
    "evaluation_ms": "Time in an evaluation before the step. checkpoint_ms, logging_ms and others are alike.",
    "loss": "The loss, for the steps that were timed or traced.",
}
"""What each step has, with its definition."""


def figures(recording: Recording, summary: Summary) -> dict[str, float]:
    """Return what is known about a recording as a whole, by name."""
    found: dict[str, float | None] = {"steps": summary.num_steps}
    if (loop := summary.loop) is not None:
        found["step_time_ms"] = loop.step_ns / 1e6
        found["goodput"] = loop.goodput
        timed = [sample for sample in recording.samples if sample.window in ("clean", "free")] or recording.samples
        counts = [sample.num_samples or 0 for sample in timed]
        found["samples_per_second"] = fmean(counts) / loop.step_ns * 1e9 if all(counts) else None
    if (throughput := summary.throughput) is not None:
        found[f"{throughput.unit}_per_second"] = throughput.per_s
    found["mfu"] = summary.mfu.share if summary.mfu is not None else None
    memory = recording.facts.get("memory") or {}
    if (peak := memory.get("peak_allocated_bytes", memory.get("peak_resident_bytes"))) is not None:
        found["timed_peak_memory_gib"] = peak / 2**30
    return {PREFIX + name: value for name in FIGURES if (value := found.get(name)) is not None}


def step_points(recording: Recording, after_ns: int = 0) -> list[Point]:
    """Return the points of every step that began at or after a time on the recording's clock.

    What the loop did after its last step is another point at that step.
    """
    if not (samples := recording.samples):
        return []
    start_s, first_ns = began_s(recording.facts), samples[0].start_ns
    has_loader = data_is_named(samples)
    points = [
        Point(sample.step, start_s + (sample.end_ns - first_ns) / 1e9, _values(sample, has_loader))
        for sample in samples
        if sample.start_ns >= after_ns
    ]
    tail = recording.tail
    if tail is not None and tail.start_ns >= after_ns:
        values = {f"{OF_STEPS}{name}_ms": tail.host_ns[name] / 1e6 for name in BETWEEN if name in tail.host_ns}
        points.append(Point(samples[-1].step, start_s + (tail.end_ns - first_ns) / 1e9, values))
    return points


def figure_point(recording: Recording, summary: Summary) -> list[Point]:
    """Return the figures of the whole recording as a point at its last step; empty without a step."""
    last: Sequence[Point] = step_points(recording, recording.samples[-1].start_ns) if recording.samples else ()
    return [Point(point.step, point.time_s, figures(recording, summary)) for point in last[-1:]]


def _values(sample: StepSample, has_loader: bool) -> dict[str, float]:
    values = {"time_ms": sample.wall_ns / 1e6}
    for unit in ("tokens", "samples"):
        if (count := getattr(sample, f"num_{unit}")) and sample.wall_ns:
            values[f"{unit}_per_second"] = count / sample.wall_ns * 1e9
    values["data_ms"] = sample.host_ns.get("data" if has_loader else "before_forward", 0) / 1e6
    for name in ("forward", "backward", "optimizer", *BETWEEN):
        if name in sample.host_ns:
            values[f"{name}_ms"] = sample.host_ns[name] / 1e6
    if sample.loss is not None:
        values["loss"] = sample.loss
    return {OF_STEPS + name: value for name, value in values.items()}
