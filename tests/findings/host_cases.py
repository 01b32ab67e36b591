"""Cases of host-side causes from traces written by hand; the profiler costs nothing in them: figures are exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from handmade import gpu_recording
from stepscope.analysis.time.overhead import Overhead
from stepscope.session.case import Case
from stepscope.trace.recording import read_recording
from trace_builder import TraceBuilder

H200 = {"deviceProperties": [{"name": "NVIDIA H200"}]}


def case_of(trace: TraceBuilder | None, recording: Path | None = None) -> Case:
    """The case of a trace, of a recording, or of both."""
    folder = recording or Path("trace.json")
    case = Case(folder, trace.read() if trace else None, 0, read_recording(recording) if recording else None)
    case.__dict__["overhead"] = Overhead()
    return case


def recorded(folder: Path, compiler: dict[str, Any] | None = None, **facts: Any) -> Path:
    """12 steps of 10 ms on an H200, with other facts where some are given."""
    gpu_recording(folder, compiler)
    path = folder / "recording.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return folder


def steps(make: Callable[[TraceBuilder, float], float], num: int = 2) -> TraceBuilder:
    """A trace of so many steps, each made from its start on; `make` says how long it took, in microseconds."""
    trace, at = TraceBuilder(**H200), 0.0
    for number in range(num):
        length = make(trace, at)
        trace.step(number + 1, at, length)
        at += length
    return trace


def kernel(trace: TraceBuilder, at: float, runs: float, took: float, op: str = "aten::mm") -> None:
    """An op of 20 µs that launches at once a kernel which takes so long."""
    number = len(trace.events) + 1
    trace.op(op, at, 20, id=number)
    trace.launch("gemm", at, runs=(runs, took), took=10, id=number)


def copy(
    trace: TraceBuilder, what: str, at: float, took: float, runs: tuple[float, float], num_bytes: int, op: str
) -> None:
    """A memcpy by an op that spans its call."""
    number = len(trace.events) + 1
    trace.op(op, at, took, id=number)
    trace.launch(
        f"Memcpy {what}", at, runs=runs, took=min(took, 10), call="cudaMemcpyAsync", id=number, bytes=num_bytes,
        category="gpu_memcpy",
    )  # fmt: skip
