"""The passes of a point: clean samples first, then each instrument in its own pass."""

import gc
import os
import re
import statistics
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepscope.recorder.clock import BACKWARD
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.model import CallHooks
from stepscope.recorder.trace_window import skip_event_parsing, union_ns
from stepscope.sweep.prepare import Pass

BACKWARD_BEGINS = "stepscope.backward begins"
LAUNCHES = ("cudaLaunch", "cuLaunch", "hipLaunch", "hipExtLaunch", "hipModuleLaunch", "GraphLaunch")


def profiler(device: str, **options: Any) -> Any:
    """Return torch's profiler of the host and of the device."""
    from torch.profiler import ProfilerActivity, profile

    # Kineto reads this once. Without it, torch 2.13 prints "profiler_start" to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    return profile(activities=activities, acc_events=True, **options)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed_call(run_once: Callable[[], Any], device: str) -> tuple[int, Any]:
    """Return the nanoseconds of one call, device work included, and its result."""
    synchronize(device)
    start_ns = time.perf_counter_ns()
    result = run_once()
    synchronize(device)
    return time.perf_counter_ns() - start_ns, result


def clean_samples(run_once: Callable[[], Any], num_steps: int, device: str) -> tuple[list[int], list[int], Any]:
    """Return consecutive steps' times, and the last result, without instruments or synchronization between steps.

    First come the nanoseconds until the host had issued each step; then those between CUDA events at the ends of
    steps, or on a CPU the host's again.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)] if device == "cuda" else []
    synchronize(device)
    if events:
        events[0].record()
    host_ns: list[int] = []
    for step in range(num_steps):
        start_ns = time.perf_counter_ns()
        result = run_once()
        if events:
            events[step + 1].record()
        host_ns.append(time.perf_counter_ns() - start_ns)
    synchronize(device)
    device_ns = [round(begin.elapsed_time(end) * 1e6) for begin, end in pairwise(events)]
    return host_ns, device_ns or list(host_ns), result


class Phases:
    """Times the phases of passes, synchronizing after each pass."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.samples_ns: dict[str, list[int]] = {}  # by phase, one sample per pass, in order; device time on a GPU

    def run(self, run_once: Pass) -> Any:
        marks: list[tuple[str, Any]] = []

        def mark(phase: str) -> None:
            marks.append((phase, _now(self._device)))

        result = run_once(mark)
        mark("end")
        synchronize(self._device)
        for (phase, begin), (_, end) in pairwise(marks):
            ns = end - begin if isinstance(begin, int) else round(begin.elapsed_time(end) * 1e6)
            self.samples_ns.setdefault(phase, []).append(ns)
        return result

    def medians_ms(self, run_once: Pass, num_steps: int) -> dict[str, float]:
        """Run that many passes and return their medians as `forward_ms`, `backward_ms`, `optimizer_ms`."""
        for _ in range(num_steps):
            self.run(run_once)
        return {
            f"{phase}_ms": statistics.median(values[-num_steps:]) / 1e6 for phase, values in self.samples_ns.items()
        }


def _now(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def cuda_before_backward_bytes(run_once: Pass) -> int | None:
    """Return the bytes allocated on the GPU when the backward pass begins; None without one."""
    seen: list[int] = []

    def on_phase(phase: str) -> None:
        if phase == BACKWARD:
            seen.append(torch.cuda.memory_allocated())

    run_once(on_phase)
    return seen[0] if seen else None


def ledger_of(run_once: Pass) -> Ledger:
    """Return the ledger of one pass of the uncompiled module: compiled code hides its ops."""
    phase: list[str] = []
    optimizers = [run_once.optimizer] if run_once.optimizer is not None else []
    ledger = Ledger([run_once.plain], optimizers, lambda: phase[-1] if phase else None)

    def on_phase(name: str) -> None:
        phase.append(name)
        if name == BACKWARD:
            ledger.backward_begins()

    run_once.drop_gradients()
    ledger.start()
    try:
        ledger.note_inputs((), run_once.batch)
        run_once(on_phase, module=run_once.plain)
    finally:
        ledger.stop()
    return ledger


def counted_flops(run_once: Pass) -> dict[str, Any]:
    facts = ledger_of(run_once).flops(compiled=False)
    model = facts["model_flops_by_dtype"]
    return {
        "flops_counted": sum(model.values()),
        "flops_counted_by_dtype": model,
        "flops_executed": sum(entry["flops"] for entry in facts["by_op"]),
        "flops_unseen": facts["error"] or ", ".join(facts["hidden_products"]) or None,
    }


# Layers are timed in one pass, synchronizing between them. The first call includes loading, planning and compiling a
# layer's kernels; later calls are its work alone.


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that are called, by name: not nested, so that none is counted twice.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)])})
    >>> list(layers_of(model))
    ['embed', 'blocks.0']
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if type(child).forward is nn.Module.forward:  # a container, never called
            found |= {f"{name}.{inner}": layer for inner, layer in layers_of(child).items()}
        else:
            found[name] = child
    return found


@contextmanager
def timed_layers(module: nn.Module, device: str) -> Iterator[dict[str, int]]:
    """Collect the nanoseconds of each layer's forward while the context is active, by name, in call order."""
    times_ns: dict[str, int] = {}
    hooks = [_timed(name, layer, device, times_ns) for name, layer in layers_of(module).items()]
    try:
        yield times_ns
    finally:
        for hook in hooks:
            hook.remove()


def median_layers_ns(run_once: Callable[[], Any], module: nn.Module, num_passes: int, device: str) -> dict[str, int]:
    passes = []
    for _ in range(num_passes):
        with timed_layers(module, device) as times_ns:
            run_once()
        passes.append(times_ns)
    return {name: round(statistics.median(times_ns[name] for times_ns in passes)) for name in passes[0]}


def _timed(name: str, layer: nn.Module, device: str, times_ns: dict[str, int]) -> CallHooks:
    began_ns = 0

    def begin(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        nonlocal began_ns
        synchronize(device)
        began_ns = time.perf_counter_ns()

    def end(_module: nn.Module) -> None:
        synchronize(device)
        times_ns[name] = times_ns.get(name, 0) + time.perf_counter_ns() - began_ns

    return CallHooks(layer, begin, end)


@dataclass(frozen=True)
class Traced:
    ops: dict[str, int]
    kernels: dict[str, int]
    num_launches: int  # calls that launch work on the GPU; a CUDA graph is one
    gpu_busy_ns: int  # time in which the GPU ran a kernel, a copy or a fill
    traced_ns: int
    peak_bytes: int | None  # on a CPU: peak bytes of tensors, as the allocator counts them
    before_backward_bytes: int | None


def traced(run_once: Callable[..., Any], device: str, before: list[torch.Tensor], keep: Path | None) -> Traced:
    """Profile one pass; `before` are the tensors that already exist, `keep` is where the trace is written."""

    def on_phase(phase: str) -> None:
        if phase == BACKWARD:
            with torch.profiler.record_function(BACKWARD_BEGINS):
                pass

    on_cpu = device != "cuda"
    traces = profiler(device, profile_memory=on_cpu, record_shapes=keep is not None)
    gc.collect()  # older garbage freed during the pass would count as released by it
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in before}
    base_bytes = sum(storages.values())
    synchronize(device)
    with traces:
        skip_event_parsing(traces)
        start_ns = time.perf_counter_ns()
        with torch.profiler.record_function("ProfilerStep#0"):
            run_once(on_phase) if isinstance(run_once, Pass) else run_once()
            synchronize(device)
        traced_ns = time.perf_counter_ns() - start_ns
    events = traces.profiler.kineto_results.events()
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        traces.export_chrome_trace(str(keep))
    is_launch = re.compile("|".join(LAUNCHES)).search
    on_host = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    ops = Counter(event.name() for event in on_host if event.name() != "[memory]")
    # The profiler repeats the host's ranges on the GPU.
    ranges = {event.name() for event in events if event.is_user_annotation()}
    gpu_work = [e for e in events if e.device_type() != torch.autograd.DeviceType.CPU and e.name() not in ranges]
    peak = at_backward = None
    if on_cpu:
        changes = sorted((event.start_ns(), event.nbytes()) for event in on_host if event.name() == "[memory]")
        running = list(accumulate((num_bytes for _, num_bytes in changes), initial=base_bytes))
        peak = max(running)
        marks = [event.start_ns() for event in on_host if event.name() == BACKWARD_BEGINS]
        if marks:
            at_backward = running[bisect_right(changes, marks[0], key=lambda change: change[0])]
    return Traced(
        ops=ops,
        kernels=Counter(e.name() for e in gpu_work if not e.name().startswith(("Memcpy", "Memset"))),
        num_launches=sum(count for name, count in ops.items() if is_launch(name) and "::" not in name),
        gpu_busy_ns=union_ns([(event.start_ns(), event.start_ns() + event.duration_ns()) for event in gpu_work]),
        traced_ns=traced_ns,
        peak_bytes=peak,
        before_backward_bytes=at_backward,
    )


def dynamo_counters() -> dict[str, float]:
    """Return the compiler's counters: `dynamo.unique_graphs`, `dynamo.graph_break`, `dynamo.frames.ok`…"""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    facts: dict[str, float] = {}
    for group, entries in utils.counters.items():
        for name, count in entries.items():
            facts["dynamo." + (name if group == "stats" else f"{group}.{name}")] = float(count)
    facts["dynamo.graph_break"] = float(sum(utils.counters["graph_break"].values()))
    return facts


def compile_ns() -> int:
    """Return the nanoseconds torch has spent compiling in this process, forward and backward."""
    utils = sys.modules.get("torch._dynamo.utils")
    spent = getattr(utils, "cumulative_time_spent_ns", {})
    return int(sum(spent.get(name, 0) for name in ("entire_frame_compile", "entire_backward_compile")))


def clear_dynamo() -> None:
    """Discard compiled code; otherwise a second size of the same code would be compiled for dynamic shapes."""
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
