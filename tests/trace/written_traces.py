"""Traces written by hand, real ones to hold against, and what must be true of every trace that was read."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from stepscope.trace.reader import read_trace
from stepscope.trace.tables import HOST, TABLES, Trace

TRACES = Path(os.environ.get("STEPSCOPE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"there are no real traces at {TRACES}")


def slice_of(name: str, category: str = "cpu_op", ts: Any = 10, dur: Any = 5, **fields: Any) -> dict[str, Any]:
    """A complete event: 5 µs from 10 µs on, on thread 7 of process 1."""
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 7, "ts": ts, "dur": dur, **fields}


def instant(name: str, ts: Any, **args: Any) -> dict[str, Any]:
    return {"ph": "i", "cat": "cpu_instant_event", "name": name, "pid": 1, "tid": 7, "ts": ts, "s": "t", "args": args}


def edge(letter: str, name: str, ts: Any, tid: Any = 7, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": letter, "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts}


def label(what: str, pid: Any, tid: Any, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


FIELDS: dict[str, Any] = {
    "schemaVersion": 1,
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "record_shapes": 1,
}

# One of everything: times in whole and in thousandths of microseconds, ids as numbers and as texts.
SEED: list[dict[str, Any]] = [
    label("process_name", 1, 0, name="python"),
    label("process_labels", 1, 0, labels="CPU"),
    label("process_name", 0, 0, name="python"),
    label("process_labels", 0, 0, labels="GPU 0"),
    label("process_sort_index", 0, 0, sort_index=5_000_000),
    label("thread_name", 1, 7, name="thread 7 (python)"),
    label("thread_name", 0, 7, name="stream 7"),
    slice_of("ProfilerStep#1", "user_annotation", 1, 100, args={"External id": 1}),
    slice_of(
        "aten::mm",
        ts=10.125,
        dur=7.25,
        args={
            "External id": 2,
            "Sequence number": 40,
            "Fwd thread id": 0,
            "Input Dims": [[8, 16], [16, 4]],
            "Input type": ["float", "float"],
            "Input Strides": [[16, 1], [4, 1]],
            "Concrete Inputs": ["", ""],
        },
    ),
    slice_of("cudaLaunchKernel", "cuda_runtime", 12, 3.5, args={"External id": 2, "correlation": 9}),
    slice_of("cuLaunchKernel", "cuda_driver", 12.5, 1, args={"correlation": 9}),
    slice_of("train.py(3): step", "python_function", 2, 90, args={"Python id": 4, "Python parent id": 3}),
    slice_of("CUPTI overhead", "overhead", 3, 1),
    slice_of("something new", "a_category_of_tomorrow", 4, 1, args={"nested": [{"a": 1}, {"a": 2}]}),
    {
        **slice_of("gemm_kernel", "kernel", 20.001, 30.999),
        "pid": 0,
        "args": {
            "External id": 2,
            "device": 0,
            "stream": 7,
            "correlation": 9,
            "grid": [4, 1, 1],
            "block": [128, 1, 1],
            "registers per thread": 32,
            "shared memory": 4096,
            "est. achieved occupancy %": 50,
        },
    },
    {
        **slice_of("Memcpy HtoD", "gpu_memcpy", 60, 2),
        "pid": 0,
        "args": {"device": 0, "stream": 7, "correlation": 10, "bytes": 512},
    },
    {
        **slice_of("Memset", "gpu_memset", 63, 1),
        "pid": 0,
        "args": {"device": 0, "stream": 7, "correlation": 11, "bytes": 64},
    },
    {
        **slice_of("ncclDevKernel", "kernel", 70, 20),
        "pid": 0,
        "args": {
            "device": 0,
            "stream": 8,
            "correlation": 12,
            "Collective name": "allreduce",
            "dtype": "Float",
            "In msg nelems": 1000,
            "Out msg nelems": 1000,
            "Group size": 2,
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
        },
    },
    {
        **slice_of("ProfilerStep#1", "gpu_user_annotation", 20.001, 69.999),
        "pid": 0,
        "args": {"External id": 1, "stream": 7},
    },
    {
        **slice_of("Event Sync", "cuda_sync", 91, 2),
        "pid": 0,
        "args": {
            "device": 0,
            "stream": 7,
            "correlation": 13,
            "wait_on_stream": 8,
            "wait_on_cuda_event_record_corr_id": 12,
        },
    },
    instant(
        "[memory]",
        11,
        **{
            "Device Type": 1,
            "Device Id": 0,
            "Addr": 140_000_000_000_000,
            "Bytes": 128,
            "Total Allocated": 128,
            "Total Reserved": 2048,
        },
    ),
    instant("Record Window End", 101),
    {"ph": "s", "id": 9, "pid": 1, "tid": 7, "ts": 12, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 9, "pid": 0, "tid": 7, "ts": 20.001, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    edge("B", "old style", 30),
    edge("B", "inner", 31),
    edge("E", "inner", 32),
    edge("E", "old style", 34),
]


def text_of(events: list[Any] | None = None, fields: dict[str, Any] | None = None, **options: Any) -> str:
    """A trace as JSON: `fields`, then the events."""
    document = {**(FIELDS if fields is None else fields), "traceEvents": SEED if events is None else events}
    return json.dumps(document, **options)


def read(folder: Path, content: str | bytes | list[Any], workers: int = 1) -> Trace:
    """The trace with this content: events, or the text of the whole file."""
    text = text_of(content) if isinstance(content, list) else content
    path = folder / "trace.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path, workers=workers)


def tables_of(trace: Trace) -> dict[str, pl.DataFrame]:
    return {table.name: getattr(trace, table.name) for table in TABLES}


def in_file_order(frame: pl.DataFrame) -> pl.DataFrame:
    """The host table is in order of thread and time: hand-written events are easier told in their own order."""
    return frame.sort("event")


def assert_sound(trace: Trace) -> None:
    """What holds of every trace, whatever the file held."""
    for table in TABLES:
        frame = getattr(trace, table.name)
        assert list(frame.schema.items()) == list(table.schema.items()), table.name
        if "event" in frame.columns:
            events = frame["event"].to_list()
            assert len(events) == len(set(events)) and all(event < trace.num_events for event in events), table.name
            assert events == sorted(events) or table is HOST, table.name
        if "thread" in frame.columns:
            assert frame["thread"].max() is None or frame["thread"].max() < trace.threads.height
    places = trace.host.select("thread", "start_ns", -pl.col("duration_ns"), "event").rows()
    assert places == sorted(places)
    assert trace.counts["num_events"].sum() == trace.num_events > 0
    for times in (trace.host, trace.device, trace.device_ranges, trace.syncs):
        assert times["start_ns"].null_count() == times["duration_ns"].null_count() == 0
        assert times["duration_ns"].min() is None or times["duration_ns"].min() >= 0
    assert all("\n" not in warning for warning in trace.warnings)
    assert all(problem.num > 0 <= problem.offset for problem in trace.problems)


def assert_same_tables(one: Trace, other: Trace) -> None:
    """Equal to the last value, order of rows and columns included."""
    for name, frame in tables_of(one).items():
        assert_frame_equal(frame, tables_of(other)[name])
    assert one.num_events == other.num_events


def real_trace(name: str) -> bytes:
    """The text of a real trace."""
    return gzip.decompress((TRACES / name).read_bytes())
