"""GPU time: exact integers on traces written by hand, brute force on random ones, and the real ones known exactly."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parametrized import parametrized
from stepscope.analysis.time.gpu_time import GpuTime, gpu_time
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import DEVICE_TABLE
from trace_builder import PUBLIC, TraceBuilder, needs_traces

EXACT_FILE = PUBLIC / "exact_gpu_time.json"
EXACT = (
    {row["file"]: row for row in json.loads(EXACT_FILE.read_text(), parse_float=Decimal)} if PUBLIC.is_dir() else {}
)
ROUNDED = "v100_ddp_1rank.json.gz"
"""Its reference figures passed through floats: see the test of its own."""
REFERENCE_NAMES = {
    "window_ms": "window_ns",
    "busy_ms": "busy_ns",
    "idle_ms": "idle_ns",
    "comp_ms": "compute_ns",
    "comm_ms": "communication_ns",
    "mem_ms": "memory_ns",
    "exposed_comm_ms": "exposed_communication_ns",
    "exposed_mem_ms": "exposed_memory_ns",
}


def test_a_kernel_alone_is_all_there_is():
    time = gpu_time(TraceBuilder().kernel("gemm", 5, 10).read().device)

    assert time == GpuTime(window_ns=10_000, busy_ns=10_000, compute_ns=10_000)


def test_communication_beside_compute_is_overlapped_and_the_rest_of_it_exposed():
    # GIVEN compute from 0 to 10 and from 20 to 30 µs, and an all-reduce from 5 to 25 on another stream
    trace = TraceBuilder().kernel("gemm", 0, 10).kernel("gemm", 20, 10)
    trace.kernel("ncclDevKernel_AllReduce", 5, 20, stream=20)

    assert gpu_time(trace.read().device) == GpuTime(
        window_ns=30_000,
        busy_ns=30_000,
        idle_ns=0,
        compute_ns=20_000,
        communication_ns=20_000,
        exposed_communication_ns=10_000,
        overlapped_communication_ns=10_000,
    )


@pytest.mark.parametrize("name", ["ncclKernel_Sum", "void NCCL_thing<3>", "rcclGenericKernel", "my_RCCL_x"])
def test_communication_is_known_by_its_name_wherever_it_stands_in_it(name):
    time = gpu_time(TraceBuilder().kernel(name, 0, 3).read().device)

    assert (time.communication_ns, time.compute_ns) == (3_000, 0)


def test_memory_is_exposed_only_where_neither_compute_nor_communication_runs():
    # GIVEN a copy from 0 to 10 µs, compute from 2 to 4, communication from 4 to 7, and a fill from 9 to 12
    trace = TraceBuilder().memcpy(0, 10).kernel("gemm", 2, 2, stream=8).kernel("nccl", 4, 3, stream=9)
    trace.memset(9, 3, stream=10)

    assert gpu_time(trace.read().device) == GpuTime(
        window_ns=12_000,
        busy_ns=12_000,
        idle_ns=0,
        compute_ns=2_000,
        communication_ns=3_000,
        memory_ns=12_000,
        exposed_communication_ns=3_000,
        exposed_memory_ns=7_000,
    )


def test_a_copy_called_like_communication_is_memory_all_the_same():
    time = gpu_time(TraceBuilder().kernel("nccl copy", 0, 4, category="gpu_memcpy").read().device)

    assert (time.memory_ns, time.communication_ns) == (4_000, 0)


def test_two_kernels_at_once_count_once():
    time = gpu_time(TraceBuilder().kernel("a", 0, 10).kernel("b", 3, 4, stream=8).kernel("c", 3, 4).read().device)

    assert (time.busy_ns, time.compute_ns, time.idle_ns) == (10_000, 10_000, 0)


def test_events_of_no_length_count_for_the_window_and_for_nothing_else():
    trace = TraceBuilder().kernel("early", 1, 0).kernel("gemm", 4, 2).kernel("late", 9, 0, stream=8)

    assert gpu_time(trace.read().device) == GpuTime(window_ns=8_000, busy_ns=2_000, idle_ns=6_000, compute_ns=2_000)


def test_one_event_of_no_length_is_a_window_of_nothing():
    assert gpu_time(TraceBuilder().kernel("point", 7, 0).read().device) == GpuTime()


def test_no_events_is_no_time():
    assert gpu_time(DEVICE_TABLE.empty()) == GpuTime()
    assert gpu_time(TraceBuilder().op("aten::mm", 0, 5).read().device) == GpuTime()


def test_several_devices_are_accounted_for_together_and_apart():
    # GIVEN device 0 busy from 0 to 10 µs and device 1 from 5 to 8 and from 20 to 24
    trace = TraceBuilder().kernel("a", 0, 10).kernel("b", 5, 3, device=1).kernel("nccl", 20, 4, device=1)
    account = trace.account()

    # THEN together one busy device is enough, and apart each has a window of its own
    assert (account.gpu_time.window_ns, account.gpu_time.busy_ns) == (24_000, 14_000)
    assert account.gpu_time_by_device == {
        0: GpuTime(window_ns=10_000, busy_ns=10_000, compute_ns=10_000),
        1: GpuTime(
            window_ns=19_000,
            busy_ns=7_000,
            idle_ns=12_000,
            compute_ns=3_000,
            communication_ns=4_000,
            exposed_communication_ns=4_000,
        ),
    }


def test_one_device_is_not_said_twice():
    assert TraceBuilder().kernel("a", 0, 10, device=3).account().gpu_time_by_device == {}


def test_nanoseconds_since_1970_stay_exact():
    start = Decimal("1712195495505582.988")  # a float of this size is a multiple of 0.25 µs
    trace = TraceBuilder()
    text = json.dumps({"traceEvents": trace.kernel("a", 111, 222).kernel("b", 333, 444).events})
    for number, value in ((111, start), (222, "0.001"), (333, start + Decimal("0.003")), (444, "0.002")):
        text = text.replace(f" {number},", f" {value},")

    assert gpu_time(_read_text(text).device) == GpuTime(window_ns=5, busy_ns=3, idle_ns=2, compute_ns=3)


def _read_text(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(text)
        return read_trace(path, workers=1)


# -- any set of events ------------------------------------------------------------------------------------------

KINDS = {"compute": ("kernel", "gemm"), "communication": ("kernel", "ncclDevKernel"), "memory": ("memcpy", "Memcpy")}
Event = tuple[str, int, int, int]
events = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(-10, 60), st.integers(0, 20), st.integers(0, 2)),
    max_size=15,
)


def device_table(some: list[Event]) -> pl.DataFrame:
    """Events given as activity, start, duration and stream."""
    rows = {
        "event": list(range(len(some))),
        "kind": [KINDS[activity][0] for activity, *_ in some],
        "name": [KINDS[activity][1] for activity, *_ in some],
        "device": [0] * len(some),
        "stream": [stream for *_, stream in some],
        "start_ns": [start for _, start, _, _ in some],
        "duration_ns": [length for _, _, length, _ in some],
    }
    schema = {name: DEVICE_TABLE.schema[name] for name in rows}
    return pl.concat([DEVICE_TABLE.empty(), pl.DataFrame(rows, schema=schema)], how="diagonal")


@given(events)
def test_the_account_is_what_counting_single_nanoseconds_gives(some):
    moments = {
        name: {ns for activity, start, length, _ in some if activity == name for ns in range(start, start + length)}
        for name in KINDS
    }
    compute, communication, memory = moments["compute"], moments["communication"], moments["memory"]
    first = min((start for _, start, _, _ in some), default=0)
    last = max((start + length for _, start, length, _ in some), default=0)
    busy = len(compute | communication | memory)

    assert gpu_time(device_table(some)) == GpuTime(
        window_ns=last - first,
        busy_ns=busy,
        idle_ns=last - first - busy,
        compute_ns=len(compute),
        communication_ns=len(communication),
        memory_ns=len(memory),
        exposed_communication_ns=len(communication - compute),
        exposed_memory_ns=len(memory - compute - communication),
        overlapped_communication_ns=len(communication & compute),
    )


@given(events)
def test_the_parts_add_up(some):
    time = gpu_time(device_table(some))

    assert time.busy_ns + time.idle_ns == time.window_ns
    assert time.compute_ns + time.exposed_communication_ns + time.exposed_memory_ns == time.busy_ns
    assert time.exposed_communication_ns + time.overlapped_communication_ns == time.communication_ns


# -- real traces ------------------------------------------------------------------------------------------------


def figures(row: dict[str, Any]) -> dict[str, int]:
    """A row of the reference in nanoseconds, under our names."""
    found = {}
    for theirs, ours in REFERENCE_NAMES.items():
        ns = Decimal(row[theirs]) * 1_000_000
        assert ns == int(ns), "the reference has digits beyond the nanosecond"
        found[ours] = int(ns)
    return found


@needs_traces
@parametrized("file", sorted(set(EXACT) - {ROUNDED}), quick=10)
def test_a_real_trace_has_its_exact_figures(file):
    device = read_trace(PUBLIC / file).device
    time = gpu_time(device).to_json()

    assert {name: time[name] for name in REFERENCE_NAMES.values()} == figures(EXACT[file])
    assert device.height == EXACT[file]["gpu_events"]


@needs_traces
def test_every_public_trace_with_gpu_events_is_in_the_reference():
    files = {str(path.relative_to(PUBLIC)) for path in PUBLIC.glob("**/*.json.gz")}

    assert files - set(EXACT) == {"cpu_only_gloo.json.gz", "rank_non_gpu.json.gz"}


@pytest.mark.long
@needs_traces
def test_where_the_reference_passed_through_floats_we_did_not():
    """Timestamps of 19 digits do not fit a float: the reference is 48 ns off, and this shows that floats are why."""
    time = gpu_time(read_trace(PUBLIC / ROUNDED).device).to_json()
    ours = {name: time[name] for name in REFERENCE_NAMES.values()}

    exact = _brute_account(PUBLIC / ROUNDED, lambda text: round(Decimal(text) * 1000))
    through_floats = _brute_account(PUBLIC / ROUNDED, lambda text: round(Decimal(float(text)) * 1000))

    assert ours == exact
    assert figures(EXACT[ROUNDED]) == through_floats
    assert {name: through_floats[name] - exact[name] for name in exact if through_floats[name] != exact[name]} == {
        "window_ns": 48,
        "idle_ns": 48,
    }


def _brute_account(path: Path, to_ns: Callable[[str], int]) -> dict[str, int]:
    """The figures by the definitions, with nothing of ours: numbers as they stand in the text, made ns by `to_ns`."""
    spans: dict[str, list[tuple[int, int]]] = {"compute": [], "communication": [], "memory": []}
    for event in json.loads(gzip.decompress(path.read_bytes()), parse_float=str, parse_int=str)["traceEvents"]:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = event["name"].lower()
        kernel = "communication" if "nccl" in name or "rccl" in name else "compute"
        start = to_ns(event["ts"])
        spans[kernel if category == "kernel" else "memory"].append((start, start + to_ns(event["dur"])))
    compute, communication, memory = spans["compute"], spans["communication"], spans["memory"]
    everything = compute + communication + memory
    window = max(end for _, end in everything) - min(start for start, _ in everything)
    busy = _covered(everything)
    return {
        "window_ns": window,
        "busy_ns": busy,
        "idle_ns": window - busy,
        "compute_ns": _covered(compute),
        "communication_ns": _covered(communication),
        "memory_ns": _covered(memory),
        "exposed_communication_ns": _covered(compute + communication) - _covered(compute),
        "exposed_memory_ns": busy - _covered(compute + communication),
    }


def _covered(spans: list[tuple[int, int]]) -> int:
    """Length of the union."""
    total, reach = 0, None
    for start, end in sorted(spans):
        if reach is None or end > reach:
            total += end - (start if reach is None else max(start, reach))
            reach = end
    return total
