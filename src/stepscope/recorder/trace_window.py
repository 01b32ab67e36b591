"""The trace window: torch.profiler over a few steps, with phases and fully qualified module names as ranges.

The file is Kineto's own Chrome trace and opens in Perfetto. The summary for the terminal (GPU-busy time by phase,
launches per step) is computed from the profiler's events in memory.
"""

from __future__ import annotations

import gzip
import json
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepscope.recorder.clock import Clock, name_between
from stepscope.recorder.model import CallHooks, named_modules
from stepscope.recorder.patches import Handle, remove_all
from stepscope.recorder.stack_samples import StackSampler

PHASE_PREFIX = "stepscope.phase/"
MODULE_PREFIX = "stepscope.module/"
STEP_PREFIX = "ProfilerStep#"
BETWEEN = "between"
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_TRACE_BYTES = 16 * 1024 * 1024


traced_by: int | None = None  # the process that took a trace; in another one, this is a fork of it


def skip_event_parsing(profiler: Any) -> None:
    """Make a running profiler stop without parsing its events in Python, which can take minutes.

    Creating it without `acc_events` does the same, but then older torch versions warn.
    """
    profiler.profiler.acc_events = False


class TraceProbe:
    """Traces a few steps: `prepare()` one step early, `start()`, then `stop()` returns a summary.

    Labels of steps have the numbers of the recording, beginning with `first_step`.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        roots: list[nn.Module],
        device: int | None,
        first_step: int = 0,
        stacks: bool = False,
    ) -> None:
        self._path = folder / name
        self._name = name
        self._roots = [weakref.ref(root) for root in roots]  # the script may release them
        self._device = device
        self._first_step = first_step
        self._step_range: Any = None
        self._phase_range: Any = None
        self._handles: list[Handle] = []
        self._num_steps = 0
        self._started = self._is_over = self._is_unwanted = False
        self._stack_sampler: StackSampler | None = None
        self.is_ours = False
        """True while this probe, and not the script, calls the profiler."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device is not None:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, with_stack=stacks, acc_events=True
        )

    def prepare(self, clock: Clock) -> None:
        """Warm the profiler up, and look at the stack until it starts."""
        global traced_by
        traced_by = os.getpid()
        with self._calling():
            self._profiler.prepare_trace()
        if not self._is_over:
            self._stack_sampler = StackSampler(lambda: clock.label)

    def lines_seen(self) -> dict[str, Any] | None:
        """Return where Python was since `prepare`, and stop looking."""
        sampler, self._stack_sampler = self._stack_sampler, None
        return sampler.stop() if sampler is not None else None

    def start(self, clock: Clock) -> None:
        """Start tracing: attach the labels and open the first step."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)  # otherwise earlier kernels would appear without a launch
        with self._calling():
            self._profiler.start_trace()
            self._started = True
            skip_event_parsing(self._profiler)
        if self._is_over:
            return
        for name, module in _named([root for one in self._roots if (root := one()) is not None]):
            self._label(name, module)
        clock.on_range = self._on_range
        self._open_step()

    def next_step(self) -> None:
        """End a traced step and begin the next."""
        self._num_steps += 1
        self._close_ranges()
        self._open_step()

    def _open_step(self) -> None:
        self._step_range = _enter(f"{STEP_PREFIX}{self._first_step + self._num_steps}")
        self._on_range(None)

    def stop(self, clock: Clock, step_finished: bool) -> dict[str, Any] | None:
        """End the window, write the trace, and return its summary, or None if no whole step was traced."""
        clock.on_range = None
        remove_all(self._handles)
        self._num_steps += step_finished
        if self._num_steps == 0 or not self._started or self._is_over:
            self.abandon()
            return None
        if self._device is not None:
            torch.cuda.synchronize(self._device)  # the last step's kernels belong in the trace
        self._close_ranges()
        self._is_over = True
        with self._calling():
            self._profiler.stop_trace()
        summary = summarize(self._profiler.profiler.kineto_results.events(), self._num_steps)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".tmp-{self._path.name}")
        self._profiler.export_chrome_trace(str(temporary))
        summary["trimmed"] = trim(temporary)
        summary["file"] = self._name
        summary["bytes"] = temporary.stat().st_size
        temporary.replace(self._path)
        return summary

    def abandon(self) -> None:
        """Stop without keeping anything. The profiler crashes if it is stopped twice or inside its own calls."""
        self.lines_seen()
        if self.is_ours:
            self._is_unwanted = True  # that call ends first
        if self.is_ours or self._is_over:
            return
        self._is_over = True
        remove_all(self._handles)
        self._close_ranges()
        with self._calling():
            if not self._started:
                self._profiler.start_trace()  # a prepared profiler can only be stopped after a start
            self._profiler.stop_trace()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        # Kineto reads its log level at first use, and torch 2.13's version prints "profiler_start" to stderr.
        quiet = "KINETO_LOG_LEVEL" not in os.environ
        if quiet:
            os.environ["KINETO_LOG_LEVEL"] = "99"
        self.is_ours = True
        try:
            yield
        finally:
            self.is_ours = False
            if quiet:
                del os.environ["KINETO_LOG_LEVEL"]
        if self._is_unwanted:
            self.abandon()

    def _on_range(self, label: str | None) -> None:
        if self._phase_range is not None:
            self._phase_range.__exit__(None, None, None)
        self._phase_range = _enter(PHASE_PREFIX + (label or BETWEEN))

    def _close_ranges(self) -> None:
        for name in ("_phase_range", "_step_range"):
            if getattr(self, name) is not None:
                getattr(self, name).__exit__(None, None, None)
                setattr(self, name, None)

    def _label(self, name: str, module: nn.Module) -> None:
        ranges: list[Any] = []

        def begin(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
            ranges.append(_enter(MODULE_PREFIX + name))

        def end(_module: nn.Module) -> None:
            if ranges:
                ranges.pop().__exit__(None, None, None)

        self._handles.append(CallHooks(module, begin, end))


def _enter(name: str) -> Any:
    label = torch.autograd.profiler.record_function(name)
    label.__enter__()
    return label


def _named(roots: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return (fully qualified name, module). A single model goes by its class name."""
    return [
        (name or type(getattr(root, "_orig_mod", root)).__name__, module)
        for root, _, modules in named_modules(roots)
        for name, module in modules
    ]


def summarize(events: list[Any], num_steps: int) -> dict[str, Any]:
    """Return a summary of the whole steps: launches, and GPU-busy nanoseconds by the phase that launched them."""
    ranges: list[tuple[int, str]] = []
    steps: list[tuple[int, int]] = []
    launches: dict[int, tuple[int, str]] = {}
    op_starts: list[int] = []
    device_events: list[tuple[int, int, int, str]] = []
    annotations: set[str] = set()
    for event in events:
        name, start = event.name(), event.start_ns()
        if event.device_type() != torch.autograd.DeviceType.CPU:
            device_events.append((start, start + event.duration_ns(), event.correlation_id(), name))
            continue
        if event.is_user_annotation():
            annotations.add(name)
        if name.startswith(PHASE_PREFIX):
            ranges.append((start, name.removeprefix(PHASE_PREFIX)))
        elif name.startswith(STEP_PREFIX):
            steps.append((start, start + event.duration_ns()))
        elif name.startswith(("cuda", "cu", "hip")) and "::" not in name:
            launches[event.correlation_id()] = (start, name)
        elif "::" in name:
            op_starts.append(start)
    ranges.sort()
    steps = sorted(steps)[:num_steps]
    begin, end = (steps[0][0], steps[-1][1]) if steps else (0, 0)
    starts = [start for start, _ in ranges]
    by_phase: dict[str, list[tuple[int, int]]] = {}
    num_kernels = num_templates = num_host_copies = 0
    for start, stop, correlation, name in device_events:
        if name in annotations or name.startswith((PHASE_PREFIX, MODULE_PREFIX, STEP_PREFIX)):
            continue  # the profiler repeats each range on the GPU side
        launch_ns = launches[correlation][0] if correlation in launches else None
        if not begin <= (start if launch_ns is None else launch_ns) <= end:
            continue  # part of an incomplete step
        if not name.startswith(("Memcpy", "Memset")):
            num_kernels += 1
            num_templates += name.startswith("triton_tem")
        num_host_copies += name.startswith(("Memcpy DtoH", "Memcpy HtoD"))
        by_phase.setdefault(_phase_at(launch_ns, starts, ranges), []).append((start, stop))
    graph_launches = [start for start, name in launches.values() if "GraphLaunch" in name]
    return {
        "num_steps": num_steps,
        "window_ns": sum(stop - start for start, stop in steps),
        "num_ops": sum(begin <= start <= end for start in op_starts),
        "num_kernels": num_kernels,
        "num_template_kernels": num_templates,
        "num_host_copies": num_host_copies,
        "num_graph_launches": sum(begin <= start <= end for start in graph_launches),
        "gpu_busy_ns": union_ns([interval for intervals in by_phase.values() for interval in intervals]),
        "gpu_busy_ns_by_phase": {phase: union_ns(intervals) for phase, intervals in by_phase.items()},
    }


def _phase_at(launch_ns: int | None, starts: list[int], ranges: list[tuple[int, str]]) -> str:
    position = bisect_right(starts, launch_ns) - 1 if launch_ns is not None else -1
    if position < 0:
        return "unattributed"
    label = ranges[position][1]
    if label != BETWEEN:
        return label
    return name_between(ranges[position + 1][1] if position + 1 < len(ranges) else None)


def union_ns(intervals: list[tuple[int, int]]) -> int:
    """Return the nanoseconds covered by at least one interval.

    >>> union_ns([(0, 10), (5, 20), (30, 40)])
    30
    """
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def trim(path: Path) -> str | None:
    """Cut a trace that is too large down to its first step or less. Return a description of the cut, or None."""
    if path.stat().st_size <= MAX_TRACE_BYTES:
        return None
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as stream:
        trace = json.load(stream)
    # Flow arrows only repeat the correlation ids.
    events = [event for event in trace["traceEvents"] if event.get("ph") not in ("s", "f")]
    labels = (e for e in events if e.get("ph") == "X" and str(e.get("name")).startswith(STEP_PREFIX))
    step = min(labels, key=lambda label: float(label["ts"]))  # the label on the host begins before those on the GPU
    kept_share = 1.0
    while True:
        trace["traceEvents"] = _until(events, step["ts"] + step["dur"] * kept_share)
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=9) as stream:
            json.dump(trace, stream, separators=(",", ":"))
        size = path.stat().st_size
        if size <= MAX_TRACE_BYTES or kept_share < 0.001:
            break
        kept_share *= 0.9 * MAX_TRACE_BYTES / size
    what = "the first step" if kept_share == 1.0 else f"the first {100 * kept_share:.1f} % of the first step"
    return f"the trace exceeded {MAX_TRACE_BYTES >> 20} MiB: only events of {what} were kept, without flow arrows"


def _until(events: list[dict[str, Any]], end: float) -> list[dict[str, Any]]:
    """Return host events that begin before `end`, and the GPU work they launched."""
    kept = []
    launched = set()
    for event in events:
        if event.get("cat") not in GPU_CATEGORIES and event.get("ts", 0) <= end:
            kept.append(event)
            launched.add((event.get("args") or {}).get("correlation"))
    launched.discard(None)
    return kept + [
        event
        for event in events
        if event.get("cat") in GPU_CATEGORIES and (event.get("args") or {}).get("correlation") in launched
    ]
