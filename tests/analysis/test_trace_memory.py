"""Memory of a trace: the peak and what was alive at it, exact on small traces, adding up on any."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_trace import any_trace
from stepscope.analysis.memory.allocator_events import (
    MemorySummary,
    at_peak_by,
    memory_devices,
    memory_summary,
    memory_timeline,
)
from stepscope.analysis.structure.links import Linked, link
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, TraceBuilder, needs_traces

CUDA, CPU, HIP = 1, 0, 6


def block(
    trace: TraceBuilder,
    ts: float,
    num_bytes: int,
    address: int | None = 4096,
    total: int | None = None,
    reserved: int | None = None,
    device_type: int = CUDA,
    device: int | None = 0,
) -> TraceBuilder:
    """An allocation, or with negative bytes a release."""
    args = {
        "Device Type": device_type,
        "Device Id": device,
        "Addr": address,
        "Bytes": num_bytes,
        "Total Allocated": total,
        "Total Reserved": reserved,
    }
    known = {key: value for key, value in args.items() if value is not None}
    return trace.raw(ph="i", cat="cpu_instant_event", name="[memory]", pid=1, tid=1, ts=ts, s="t", args=known)


def a_step() -> TraceBuilder:
    """1000 bytes held before; 300 taken by a product and kept, 500 by a clone at the peak, then released."""
    trace = TraceBuilder().step(3, 0, 100).annotation("stepscope.module/model.mlp", 5, 60)
    trace.op("aten::linear", 10, 10).op("aten::mm", 11, 8)
    block(trace, 12, 300, 1, total=1300, reserved=4000)
    trace.op("aten::contiguous", 30, 10).op("aten::clone", 31, 8).op("aten::empty_like", 32, 4)
    trace.op("aten::empty_strided", 33, 2)
    block(trace, 34, 500, 2, total=1800, reserved=4000)
    block(trace, 70, -500, 2, total=1300, reserved=6000)
    return block(trace, 80, -900, 3, total=400, reserved=6000)


def only(linked: Linked) -> MemorySummary:
    (summary,) = memory_summary(linked)
    return summary


def named(table: pl.DataFrame) -> dict[str, int]:
    return dict(table.select("name", "bytes").iter_rows())


def test_the_peak_is_where_the_allocators_own_total_is_highest():
    summary = only(a_step().linked())

    assert (summary.device_type, summary.device) == ("cuda", 0)
    assert (summary.start_bytes, summary.is_start_known) == (1000, True)
    assert (summary.peak_allocated_bytes, summary.peak_reserved_bytes) == (1800, 6000)
    assert (summary.peak_time_ns, summary.peak_step) == (34_000, 3)
    # The op that somebody called, not the one that allocates for it.
    assert (summary.peak_op, summary.peak_module) == ("aten::contiguous", "model.mlp")
    assert (summary.num_allocations, summary.num_releases, summary.num_allocations_per_step) == (2, 2, 2.0)


def test_what_was_alive_at_the_peak_adds_up_to_it():
    summary = only(a_step().linked())

    assert named(at_peak_by(summary, "op")) == {"before_the_trace": 1000, "aten::contiguous": 500, "aten::mm": 300}
    assert named(at_peak_by(summary, "module")) == {"before_the_trace": 1000, "model.mlp": 800}
    assert named(at_peak_by(summary, "phase")) == {"before_the_trace": 1000, "forward": 800}
    assert at_peak_by(summary, "op")["share"].to_list() == [pytest.approx(b / 1800) for b in (1000, 500, 300)]


def test_the_timeline_begins_with_what_was_there():
    assert memory_timeline(a_step().linked()).rows() == [
        (12_000, 1000, None),
        (12_000, 1300, 4000),
        (34_000, 1800, 4000),
        (70_000, 1300, 6000),
        (80_000, 400, 6000),
    ]


def test_a_block_taken_again_at_the_same_address_is_another_block():
    trace = TraceBuilder().op("aten::add", 0, 2).op("aten::mul", 10, 2)
    block(trace, 1, 100, 7, total=100)
    block(trace, 5, -100, 7, total=0)
    block(trace, 11, 200, 7, total=200)

    assert named(at_peak_by(only(trace.linked()), "op")) == {"aten::mul": 200, "before_the_trace": 0}


def test_a_block_whose_release_the_trace_missed_is_not_alive_twice():
    trace = TraceBuilder().op("aten::add", 0, 20)
    block(trace, 1, 100, 7, total=100)
    block(trace, 11, 200, 7, total=200)

    assert named(at_peak_by(only(trace.linked()), "op")) == {"aten::add": 200, "before_the_trace": 0}


def test_the_peak_may_be_before_the_first_event():
    trace = TraceBuilder().op("aten::add", 0, 20)
    block(trace, 1, -600, 7, total=400)
    block(trace, 2, 100, 8, total=500)
    summary = only(trace.linked())

    assert (summary.peak_allocated_bytes, summary.peak_time_ns) == (1000, 1000)
    assert (summary.peak_op, summary.peak_step) == (None, None)
    assert named(at_peak_by(summary, "op")) == {"before_the_trace": 1000}


def test_without_totals_it_is_at_least_what_the_trace_saw_released():
    # GIVEN addresses and no totals: 100 and 200 were there before, since they are released
    trace = TraceBuilder().op("aten::add", 0, 2)
    block(trace, 1, 500, 1)
    block(trace, 3, -100, 2)
    block(trace, 4, -500, 1)
    block(trace, 5, -200, 3)
    linked = trace.linked()
    summary = only(linked)

    assert (summary.start_bytes, summary.is_start_known) == (300, False)
    assert (summary.peak_allocated_bytes, summary.peak_reserved_bytes) == (800, None)
    assert named(at_peak_by(summary, "op")) == {"aten::add": 500, "before_the_trace": 300}
    assert memory_timeline(linked)["allocated_bytes"].to_list() == [300, 800, 700, 200, 0]


def test_without_totals_it_is_never_less_than_nothing():
    # GIVEN two releases of one address, the allocation between them missing
    trace = TraceBuilder().op("aten::add", 0, 2)
    block(trace, 1, -100, 7)
    block(trace, 2, -30, 7)

    assert memory_timeline(trace.linked())["allocated_bytes"].to_list() == [130, 30, 0]


def test_without_addresses_nobody_can_tell_what_was_alive():
    trace = TraceBuilder().op("aten::add", 0, 2)
    block(trace, 1, -50, None)
    block(trace, 2, 500, None)
    summary = only(trace.linked())

    assert (summary.start_bytes, summary.is_start_known, summary.peak_allocated_bytes) == (50, False, 500)
    assert named(at_peak_by(summary, "op")) == {"unattributed": 500}
    assert summary.at_peak["origin"].to_list() == ["unknown"]


def test_memory_of_no_known_op_is_unattributed():
    trace = TraceBuilder().op("aten::add", 0, 2)
    block(trace, 50, 100, 1, total=100)

    assert named(at_peak_by(only(trace.linked()), "op")) == {"unattributed": 100, "before_the_trace": 0}


def test_each_device_has_its_own_account():
    trace = TraceBuilder().op("aten::add", 0, 20)
    block(trace, 1, 100, 1, total=100, reserved=512)
    block(trace, 2, 300, 1, total=300, reserved=512, device=1)
    block(trace, 3, 8, 1, total=8, reserved=0, device_type=CPU, device=-1)
    block(trace, 4, 50, 1, total=50, reserved=512, device_type=HIP)
    linked = trace.linked()

    peaks = [(s.device_type, s.device, s.peak_allocated_bytes, s.peak_reserved_bytes) for s in memory_summary(linked)]
    assert peaks == [("cuda", 1, 300, 512), ("cuda", 0, 100, 512), ("hip", 0, 50, 512), ("cpu", -1, 8, None)]
    assert memory_devices(linked) == [(0, -1), (1, 0), (1, 1), (6, 0)]
    assert memory_timeline(linked)["allocated_bytes"].to_list() == [0, 100]
    assert memory_timeline(linked, "cuda", 1)["allocated_bytes"].to_list() == [0, 300]
    assert memory_timeline(linked, "cpu")["reserved_bytes"].to_list() == [None, None]


def test_a_trace_without_memory_has_no_account():
    linked = TraceBuilder().op("aten::add", 0, 2).linked()

    assert memory_summary(linked) == () and memory_timeline(linked).is_empty()
    assert memory_timeline(a_step().linked(), "xpu").is_empty()


def test_the_summary_as_json_has_plain_values_and_each_split():
    shown: dict[str, Any] = only(a_step().linked()).to_json()

    assert shown["peak_allocated_bytes"] == 1800 and "at_peak" not in shown
    for split in ("op", "module", "phase"):
        assert sum(row["bytes"] for row in shown[f"at_peak_by_{split}"]) == 1800


@given(st.lists(st.integers(-5, 9), min_size=1, max_size=120), st.integers(4, 30))
def test_a_thinned_timeline_keeps_real_points_the_ends_and_the_extremes(changes, max_points):
    trace = TraceBuilder().op("aten::add", 0, 2)
    total = 1000
    for number, change in enumerate(changes):
        total += change or 1
        block(trace, number, change or 1, number, total=total)
    linked = trace.linked()

    whole = memory_timeline(linked, max_points=10_000)
    thin = memory_timeline(linked, max_points=max_points)

    assert whole.height == len(changes) + 1
    assert thin.height <= max_points
    assert set(thin.rows()) <= set(whole.rows()) and thin["time_ns"].is_sorted()
    assert (thin.row(0), thin.row(-1)) == (whole.row(0), whole.row(-1))
    assert thin["allocated_bytes"].max() == whole["allocated_bytes"].max()
    assert thin["allocated_bytes"].min() == whole["allocated_bytes"].min()


@pytest.mark.long
@given(
    any_trace(most_events=6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 100), st.booleans()), max_size=20),
    st.booleans(),
)
def test_the_parts_add_up_to_the_peak_whatever_the_trace(builder, events, has_totals):
    # GIVEN sound allocations and releases at a few addresses, some of them there before
    held = {0: 50, 1: 70}
    start = sum(held.values())
    highest = total = start
    alive: dict[int, int] = {}
    at_highest: dict[int, int] = {}
    for number, (address, size, _) in enumerate(events):
        change = -held.pop(address) if address in held else size
        if change > 0:
            held[address] = alive[address] = change
        else:
            alive.pop(address, None)
        total += change
        if total > highest:
            highest, at_highest = total, dict(alive)
        block(builder, number / 10, change, address, total=total if has_totals else None, device=5)
    linked = builder.linked()

    for summary in memory_summary(linked):
        assert summary.at_peak["bytes"].sum() == summary.peak_allocated_bytes
        for column in ("op", "module", "phase"):
            assert at_peak_by(summary, column)["bytes"].sum() == summary.peak_allocated_bytes
        if summary.device == 5 and has_totals:
            assert summary.peak_allocated_bytes == highest
            seen = summary.at_peak.filter(pl.col("origin") == "in_the_trace")
            assert seen["bytes"].sum() == sum(at_highest.values())


@needs_traces
@pytest.mark.parametrize(
    ("name", "gib", "op", "start"),
    [
        ("gpt2_eager", 12.243, "aten::_log_softmax_backward_data", 1_564_342_272),
        ("contiguous_copies", 2.751, "aten::to", 403_705_856),
        ("llama_compiled", 15.415, "CompiledFunctionBackward", 3_060_357_632),
        ("fp32_no_tf32", 13.985, None, None),
        ("mask_blocks_flash", 4.456, None, None),
    ],
)
def test_the_peak_of_a_real_trace_is_the_one_that_was_measured(name, gib, op, start):
    linked = link(read_trace(TRACES / f"h200/{name}.json.gz", workers=1))
    summary = memory_summary(linked)[0]

    assert round(summary.peak_allocated_bytes / 2**30, 3) == gib
    assert summary.at_peak["bytes"].sum() == summary.peak_allocated_bytes
    assert op in (None, summary.peak_op) and start in (None, summary.start_bytes)
    # Everything taken in these steps is given back in them: what is left of the peak was there before.
    before = summary.at_peak.filter(pl.col("origin") == "before_the_trace")["bytes"].item()
    assert before == summary.start_bytes
    timeline = memory_timeline(linked)
    assert timeline.height <= 2000 and timeline["allocated_bytes"].max() == summary.peak_allocated_bytes


@needs_traces
def test_an_old_trace_without_totals_and_addresses_gives_the_least_it_can_be():
    linked = link(read_trace(TRACES / "public/resnet50_v100_torch1.9.json.gz", workers=1))
    cuda = memory_summary(linked)[0]

    assert (cuda.device_type, cuda.is_start_known, cuda.start_bytes) == ("cuda", False, 0)
    assert (cuda.peak_allocated_bytes, cuda.num_allocations_per_step) == (2_791_636_480, 685.0)
    assert cuda.at_peak["origin"].to_list() == ["unknown"]
