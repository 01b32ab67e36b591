"""Kineto traces written by hand: a line an event, in microseconds, so that every figure can be checked in the head.

trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20, id=5)
trace.launch("gemm", 12, runs=(30, 40), id=5)      # the call at 12 µs, the kernel 40 µs long from 30 µs on
linked = trace.linked()
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.ranks.rank_account import RankAccount, account
from stepscope.analysis.structure.links import Linked, link
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import Trace

TRACES = Path(os.environ.get("STEPSCOPE_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
PUBLIC = TRACES / "public"
needs_traces = pytest.mark.skipif(
    not PUBLIC.is_dir(), reason="the real traces are not here: set STEPSCOPE_TRACES to their folder"
)

MAIN = 1
"""The thread of everything that names no other."""
AUTOGRAD = 2
Microseconds = float


def us(ns: int) -> Microseconds:
    """Nanoseconds as the profiler writes them: microseconds with three decimals."""
    return ns / 1000


class TraceBuilder:
    """Events of one process, in the order in which they are told; every method returns the builder."""

    def __init__(self, **fields: Any) -> None:
        self.fields: dict[str, Any] = {"schemaVersion": 1, **fields}
        self.events: list[dict[str, Any]] = []
        self._num_launches = 0

    # -- the host ---------------------------------------------------------------------------------------------

    def op(
        self,
        name: str,
        ts: Microseconds,
        dur: Microseconds,
        thread: int = MAIN,
        *,
        id: int | None = None,
        sequence: int | None = None,
        forward_thread: int | None = None,
        **args: Any,
    ) -> TraceBuilder:
        numbers = {"External id": id, "Sequence number": sequence, "Fwd thread id": forward_thread}
        return self.slice("cpu_op", name, ts, dur, thread, **numbers, **args)

    def annotation(self, name: str, ts: Microseconds, dur: Microseconds, thread: int = MAIN) -> TraceBuilder:
        return self.slice("user_annotation", name, ts, dur, thread)

    def step(self, number: int, ts: Microseconds, dur: Microseconds) -> TraceBuilder:
        return self.annotation(f"ProfilerStep#{number}", ts, dur)

    def python(self, name: str, ts: Microseconds, dur: Microseconds, thread: int = MAIN) -> TraceBuilder:
        return self.slice("python_function", name, ts, dur, thread)

    def call(
        self,
        name: str,
        ts: Microseconds,
        dur: Microseconds,
        thread: int = MAIN,
        *,
        correlation: int | None = None,
        id: int | None = None,
        category: str = "cuda_runtime",
    ) -> TraceBuilder:
        """A runtime call, or with `category="cuda_driver"` one of the driver."""
        return self.slice(category, name, ts, dur, thread, **{"correlation": correlation, "External id": id})

    # -- the device -------------------------------------------------------------------------------------------

    def kernel(
        self,
        name: str,
        ts: Microseconds,
        dur: Microseconds,
        *,
        stream: int = 7,
        device: int = 0,
        correlation: int | None = None,
        id: int | None = None,
        category: str = "kernel",
        **args: Any,
    ) -> TraceBuilder:
        """GPU work alone: without a `correlation` nobody launched it."""
        numbers = {"device": device, "stream": stream, "correlation": correlation, "External id": id, **args}
        return self._add(category, name, ts, dur, f"GPU {device}", stream, numbers)

    def memcpy(self, ts: Microseconds, dur: Microseconds, num_bytes: int = 4096, **where: Any) -> TraceBuilder:
        return self.kernel("Memcpy HtoD", ts, dur, category="gpu_memcpy", bytes=num_bytes, **where)

    def memset(self, ts: Microseconds, dur: Microseconds, num_bytes: int = 64, **where: Any) -> TraceBuilder:
        return self.kernel("Memset (Device)", ts, dur, category="gpu_memset", bytes=num_bytes, **where)

    def launch(
        self,
        name: str,
        at: Microseconds,
        runs: tuple[Microseconds, Microseconds] | Iterable[tuple[Microseconds, Microseconds]],
        *,
        took: Microseconds = 1,
        thread: int = MAIN,
        call: str = "cudaLaunchKernel",
        id: int | None = None,
        **where: Any,
    ) -> TraceBuilder:
        """A call at `at` that took so long, and the kernel that ran from it (start, duration); many for a graph."""
        self._num_launches += 1
        number = 1000 + self._num_launches
        self.call(call, at, took, thread, correlation=number, id=id)
        pieces = [runs] if isinstance(runs, tuple) else list(runs)
        for start, duration in pieces:
            self.kernel(name, start, duration, correlation=number, **where)
        return self

    # -- the rest ---------------------------------------------------------------------------------------------

    def memory(self, ts: Microseconds, num_bytes: int, thread: int = MAIN) -> TraceBuilder:
        args = {"Device Type": 1, "Device Id": 0, "Addr": 4096, "Bytes": num_bytes, "Total Allocated": 1 << 20}
        return self.raw(ph="i", cat="cpu_instant_event", name="[memory]", pid=1, tid=thread, ts=ts, s="t", args=args)

    def slice(
        self, category: str, name: str, ts: Microseconds, dur: Microseconds, thread: int = MAIN, **args: Any
    ) -> TraceBuilder:
        """A complete event of the host, of any category."""
        return self._add(category, name, ts, dur, 1, thread, args)

    def raw(self, **event: Any) -> TraceBuilder:
        """An event as it stands in the file."""
        self.events.append(event)
        return self

    def _add(
        self, category: str, name: str, ts: Microseconds, dur: Microseconds, pid: Any, tid: Any, args: dict[str, Any]
    ) -> TraceBuilder:
        known = {key: value for key, value in args.items() if value is not None}
        return self.raw(ph="X", cat=category, name=name, pid=pid, tid=tid, ts=ts, dur=dur, args=known)

    # -- what becomes of it -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """The events, one a line: what a failing property shows."""
        fields = ("cat", "name", "ts", "dur", "tid", "args")
        shown = ("  " + " ".join(str(event.get(field)) for field in fields) for event in self.events)
        return "\n".join(["TraceBuilder:", *shown])

    def write(self, path: Path) -> Path:
        """The trace as a file, compressed when its name ends in `.gz`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.fields, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    def read(self) -> Trace:
        """The tables of the trace, through a file and the reader."""
        with tempfile.TemporaryDirectory() as folder:
            return read_trace(self.write(Path(folder) / "trace.json"), workers=1)

    def linked(self) -> Linked:
        return link(self.read())

    def account(self, step: int | None = None) -> RankAccount:
        return account(self.read(), 0, step)


def phases_of(linked: Linked) -> list[tuple[str, int, int]]:
    """Each stretch of a phase with its start and end, in whole microseconds."""
    return [(phase, start // 1000, end // 1000) for start, end, phase in linked.steps.phases.rows()]
