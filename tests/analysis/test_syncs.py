"""Synchronizations: who waited for whom and what it cost, exact on small traces, never counted twice on any."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_trace import any_trace
from parametrized import parametrized
from stepscope.analysis.structure.links import link
from stepscope.analysis.time.gpu_time import gpu_time
from stepscope.analysis.time.syncs import KINDS, syncs, syncs_summary
from stepscope.trace.reader import read_trace
from trace_builder import MAIN, TRACES, TraceBuilder, needs_traces, us

PAGEABLE = "Memcpy DtoH (Device -> Pageable)"
PINNED = "Memcpy DtoH (Device -> Pinned)"
FROM_PAGEABLE = "Memcpy HtoD (Pageable -> Device)"


def rows(trace: TraceBuilder) -> list[dict[str, Any]]:
    return syncs(trace.linked()).to_dicts()


def only(trace: TraceBuilder) -> dict[str, Any]:
    (row,) = rows(trace)
    return row


def copy(
    trace: TraceBuilder, name: str, at: float, took: float, runs: tuple[float, float], call: str = "cudaMemcpyAsync"
) -> TraceBuilder:
    return trace.launch(name, at, runs, took=took, call=call, category="gpu_memcpy", bytes=8)


def report(trace: TraceBuilder, name: str, ts: float, dur: float, **args: Any) -> TraceBuilder:
    """What the driver says of a synchronization."""
    return trace.raw(ph="X", cat="cuda_sync", name=name, pid=0, tid=7, ts=ts, dur=dur, args={"device": 0, **args})


def test_the_host_waits_for_the_device_and_the_device_then_for_the_host():
    # GIVEN a kernel until 50, the host waiting for it from 20 to 55, and the next kernel at 70
    trace = TraceBuilder().step(2, 0, 100).op("aten::mm", 1, 5).launch("gemm", 2, runs=(10, 40))
    trace.call("cudaDeviceSynchronize", 20, 35).op("aten::add", 60, 5).launch("add", 61, runs=(70, 5))

    row = only(trace)

    assert (row["kind"], row["call"], row["thread"]) == ("host_wait", "cudaDeviceSynchronize", 0)
    assert (row["start_ns"], row["duration_ns"], row["busy_ns"]) == (20_000, 35_000, 30_000)
    assert (row["waited_for"], row["waited_for_stream"], row["wait_ns"]) == ("gemm", 7, 30_000)
    assert row["idle_after_ns"] == 20_000  # from 50, where the GPU was done, to 70
    assert (row["step"], row["op"], row["outer_op"]) == (2, None, None)


def test_the_value_of_a_tensor_is_a_wait_of_the_op_that_asked():
    trace = TraceBuilder().op("aten::mm", 1, 3).launch("gemm", 2, runs=(5, 30), stream=9)
    trace.annotation("stepscope.module/loss", 9, 60)
    trace.op("aten::is_nonzero", 10, 50).op("aten::item", 11, 48).op("aten::_local_scalar_dense", 12, 46)
    copy(trace, PINNED, 13, 2, runs=(40, 2)).call("cudaStreamSynchronize", 16, 28)
    trace.kernel("other stream", 30, 12.5, stream=9).op("aten::add", 70, 3).launch("add", 71, runs=(75, 5))

    row = only(trace)

    assert (row["op"], row["outer_op"], row["module"]) == ("aten::_local_scalar_dense", "aten::is_nonzero", "loss")
    # It waits for its own copy, on stream 7, whatever else ends later.
    assert (row["wait_on_stream"], row["waited_for"], row["wait_ns"]) == (7, PINNED, 26_000)
    assert (row["busy_ns"], row["idle_after_ns"]) == (26_500, 32_500)


@parametrized(
    ("name", "call", "took", "is_wait"),
    [
        (PAGEABLE, "cudaMemcpyAsync", 1, True),  # returns when the copy is done, so the driver's documents say
        (PAGEABLE, "cudaMemcpyAsync", 40, True),
        (PINNED, "cudaMemcpyAsync", 40, False),
        (FROM_PAGEABLE, "cudaMemcpyAsync", 8, False),  # back before the copy began: a small buffer took it
        (FROM_PAGEABLE, "cudaMemcpyAsync", 12, True),
        (PINNED, "cudaMemcpy", 40, True),
        (PINNED, "cudaMemcpy2D", 40, True),
        (PINNED, "cuMemcpyDtoH_v2", 40, True),
        (PINNED, "hipMemcpyWithStream", 40, True),
        ("Memcpy DtoD (Device -> Device)", "hipMemcpyWithStream", 40, True),
        ("Memcpy DtoD (Device -> Device)", "cudaMemcpy", 40, False),
        ("Memcpy DtoD (Device -> Device)", "cudaMemcpyAsync", 40, False),
    ],
    quick=6,
)
def test_which_copies_make_the_host_wait(name, call, took, is_wait):
    # GIVEN a copy called at 10 that runs from 20 to 22
    trace = copy(TraceBuilder().op("aten::copy_", 9, 50), name, 10, took, runs=(20, 2), call=call)

    found = rows(trace)

    assert [(row["kind"], row["call"], row["waited_for"]) for row in found] == [("host_wait", call, name)] * is_wait
    if is_wait:
        assert found[0]["wait_ns"] == min(12, took) * 1000


@pytest.mark.parametrize(
    "call",
    [
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "hipDeviceSynchronize",
        "hipEventSynchronize",
        "cuCtxSynchronize",
    ],
)
def test_every_runtimes_synchronize_is_a_wait(call):
    assert only(TraceBuilder().op("aten::mm", 0, 1).call(call, 5, 1))["kind"] == "host_wait"


@pytest.mark.parametrize("call", ["cudaLaunchKernel", "cudaEventQuery", "cudaEventRecord", "cudaMemsetAsync"])
def test_what_does_not_wait_is_not_a_synchronization(call):
    assert rows(TraceBuilder().op("aten::mm", 0, 1).call(call, 5, 1)) == []


def test_idle_time_after_two_waits_is_divided_between_them():
    # GIVEN the GPU idle from 10 to 40, and two waits that return in it
    trace = TraceBuilder().op("aten::mm", 0, 1).launch("a", 0.5, runs=(1, 9))
    trace.call("cudaStreamSynchronize", 5, 7).call("cudaDeviceSynchronize", 15, 2).launch("b", 39, runs=(40, 5))

    assert [row["idle_after_ns"] for row in rows(trace)] == [5_000, 25_000]


def test_a_wait_that_leaves_the_gpu_at_work_or_comes_after_it_costs_no_idle_time():
    trace = TraceBuilder().op("aten::mm", 0, 1).launch("a", 0.5, runs=(1, 90), stream=7)
    trace.call("cudaStreamSynchronize", 5, 7).call("cudaDeviceSynchronize", 95, 2)

    assert [row["idle_after_ns"] for row in rows(trace)] == [0, 0]


def test_a_wait_that_returns_as_work_begins_costs_no_idle_time():
    trace = TraceBuilder().op("aten::mm", 0, 1).launch("a", 0.5, runs=(1, 9)).launch("b", 0.7, runs=(20, 9))

    assert only(trace.call("cudaDeviceSynchronize", 5, 15))["idle_after_ns"] == 0


def test_a_stream_that_waits_for_another_is_told_by_the_driver():
    # GIVEN a kernel on stream 20 until 50 whose end is recorded, and stream 24 told to wait for it at 12
    trace = TraceBuilder().op("aten::mm", 0, 1).launch("first", 1, runs=(5, 45), stream=20)
    trace.launch("own", 3, runs=(4, 16), stream=24)
    trace.call("cudaEventRecord", 10, 1, correlation=1).call("cudaStreamWaitEvent", 12, 1, correlation=2)
    trace.launch("later", 13, runs=(60, 5), stream=20).launch("second", 14, runs=(52, 5), stream=24)
    told = {"correlation": 2, "stream": 24, "wait_on_stream": 20, "wait_on_cuda_event_record_corr_id": 1}
    report(trace, "Stream Wait Event", 12.2, 0.5, **told)

    row = only(trace)

    assert (row["kind"], row["call"]) == ("stream_wait", "cudaStreamWaitEvent")
    assert (row["stream"], row["wait_on_stream"]) == (24, 20)
    # Its own work ends at 20, the other's at 50.
    assert (row["waited_for"], row["waited_for_stream"], row["wait_ns"]) == ("first", 20, 30_000)
    assert row["idle_after_ns"] is None


def test_a_stream_wait_that_the_driver_says_nothing_of_names_nobody():
    row = only(TraceBuilder().op("aten::mm", 0, 1).launch("k", 1, runs=(3, 4)).call("cudaStreamWaitEvent", 5, 1))

    assert (row["kind"], row["wait_on_stream"], row["waited_for"], row["wait_ns"]) == (
        "stream_wait",
        None,
        None,
        None,
    )


def test_what_the_driver_reports_belongs_to_the_call_or_stands_alone():
    trace = TraceBuilder().op("aten::mm", 0, 20).launch("k", 1, runs=(3, 4), stream=20).launch("j", 2, runs=(3, 6))
    trace.call("cudaEventQuery", 8, 1, correlation=1).call("cudaDeviceSynchronize", 10, 5, correlation=2)
    report(trace, "Event Sync", 8.1, 0.5, correlation=1, stream=-1, wait_on_stream=20)
    report(trace, "Context Sync", 10.1, 4, correlation=2, stream=-1)
    report(trace, "Stream Sync", 16, 2, correlation=3, stream=-1, wait_on_stream=20)
    report(trace, "Stream Sync", 19, 2, stream=-1, wait_on_stream=20)

    found = [(row["kind"], row["call"], row["wait_on_stream"], row["waited_for"]) for row in rows(trace)]

    assert found == [
        ("query", "cudaEventQuery", 20, None),
        ("host_wait", "cudaDeviceSynchronize", None, "j"),
        ("host_wait", "Stream Sync", 20, "k"),
        ("host_wait", "Stream Sync", 20, "k"),
    ]


def test_a_report_without_a_correlation_is_of_no_call():
    trace = TraceBuilder().op("aten::mm", 0, 20).call("cudaLaunchKernel", 1, 1, correlation=0)
    report(trace, "Context Sync", 10, 4, correlation=0, stream=-1)

    assert [(row["kind"], row["call"]) for row in rows(trace)] == [("host_wait", "Context Sync")]


def test_the_summary_puts_first_what_leaves_the_gpu_idle_longest():
    trace = TraceBuilder().step(1, 0, 50).step(2, 50, 50)
    for start in (0, 50):
        trace.op("aten::item", start + 1, 20).op("aten::_local_scalar_dense", start + 2, 18)
        copy(trace, PAGEABLE, start + 3, 9, runs=(start + 5, 5))
        trace.call("cudaDeviceSynchronize", start + 40, 1)
    linked = trace.linked()

    summary = syncs_summary(syncs(linked), linked.steps.num)

    assert summary.to_dicts() == [
        {
            "kind": "host_wait", "call": "cudaMemcpyAsync", "op": "aten::item", "num_calls": 2, "total_ns": 18_000,
            "busy_ns": 10_000, "wait_ns": 14_000, "idle_after_ns": 30_000, "waited_for": PAGEABLE,
            "num_calls_per_step": 1.0,
        },
        {
            "kind": "host_wait", "call": "cudaDeviceSynchronize", "op": None, "num_calls": 2, "total_ns": 2_000,
            "busy_ns": 0, "wait_ns": 0, "idle_after_ns": 15_000, "waited_for": PAGEABLE, "num_calls_per_step": 1.0,
        },
    ]  # fmt: skip


def test_a_trace_without_a_gpu_has_waits_of_nothing():
    row = only(TraceBuilder().op("aten::mm", 0, 1).call("cudaDeviceSynchronize", 5, 1))

    assert (row["busy_ns"], row["waited_for"], row["wait_ns"], row["idle_after_ns"]) == (0, None, None, None)
    nothing = syncs(TraceBuilder().op("aten::mm", 0, 1).linked())
    assert nothing.is_empty() and syncs_summary(nothing, 0).is_empty()


calls = st.sampled_from(["cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "cudaStreamWaitEvent"])


@given(any_trace(), st.lists(st.tuples(calls, st.integers(0, 300), st.integers(0, 60)), max_size=8))
def test_no_idle_time_counts_twice_whatever_the_trace(builder, waits):
    for name, start, length in waits:
        builder.call(name, us(start), us(length), MAIN)
    linked = builder.linked()

    table = syncs(linked)
    summary = syncs_summary(table, linked.steps.num)

    assert set(table["kind"]) <= KINDS.keys() and table["start_ns"].is_sorted()
    assert table["event"].is_unique().all()
    assert (table["busy_ns"] <= table["duration_ns"]).all() and (table["busy_ns"] >= 0).all()
    assert (table["idle_after_ns"].drop_nulls() >= 0).all() and (table["wait_ns"].drop_nulls() >= 0).all()
    assert table["idle_after_ns"].sum() <= gpu_time(linked.device).idle_ns
    for column, name in (("duration_ns", "total_ns"), ("idle_after_ns", "idle_after_ns"), ("busy_ns", "busy_ns")):
        assert summary[name].sum() == table[column].sum()


def test_busy_time_is_what_a_clock_would_count():
    # GIVEN overlapping work on two streams, and waits that begin and end anywhere
    trace = TraceBuilder().op("aten::mm", 0, 1)
    work = [(3, 9), (7, 14), (20, 21), (30, 30), (33, 40)]
    for number, (start, end) in enumerate(work):
        trace.kernel("k", start, end - start, stream=number % 2)
    waits = [(first, last) for first in range(0, 45, 4) for last in range(first, 45, 5)]
    for first, last in waits:
        trace.call("cudaDeviceSynchronize", first, last - first, thread=100 + first * 50 + last)

    counted = {(row["start_ns"], row["duration_ns"]): row["busy_ns"] for row in rows(trace)}

    for first, last in waits:
        busy = sum(any(start <= moment < end for start, end in work) for moment in range(first, last))
        assert counted[first * 1000, (last - first) * 1000] == busy * 1000


def real(name: str) -> pl.DataFrame:
    linked = link(read_trace(TRACES / f"{name}.json.gz", workers=1))
    table = syncs(linked)
    assert table["idle_after_ns"].sum() <= gpu_time(linked.device).idle_ns
    return table


@needs_traces
def test_a_real_trace_waits_where_the_script_does():
    table = real("h200/gpt2_eager")

    assert table["call"].to_list() == [
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize",
        "cudaDeviceSynchronize",
    ]  # fmt: skip
    assert table["outer_op"].to_list() == ["aten::is_nonzero", None, "aten::is_nonzero", None, None]
    assert table["step"].to_list() == [3, 3, 4, 4, None]  # the last one is the profiler's own
    assert table["busy_ns"].to_list() == [0, 14_061_008, 0, 2_554_412, 0]
    assert table["idle_after_ns"].to_list() == [302_277, 1_013_238, 515_828, 0, 0]


@needs_traces
def test_the_streams_of_a_real_trace_wait_for_each_other():
    rows = real("public/event_sync_multi_stream_a100").to_dicts()

    waits = [row for row in rows if row["kind"] == "stream_wait"]
    assert [(row["stream"], row["wait_on_stream"], row["waited_for"]) for row in waits] == [
        (24, 20, "ampere_sgemm_128x64_nn")
    ]
    assert [row["kind"] for row in rows] == ["query", "query", "stream_wait", "query", "host_wait"]


@needs_traces
def test_copies_from_pageable_memory_stop_the_host_of_a_real_trace():
    table = real("public/resnet50_v100_torch1.9")

    copied = table.filter(pl.col("call") == "cudaMemcpyAsync")
    assert copied.height == 6 and copied["outer_op"].unique().to_list() == ["aten::to"]
    # The first waits 8.7 ms, of which the GPU works 1.6.
    assert copied.select("duration_ns", "busy_ns", "wait_ns").row(0) == (8_678_000, 1_574_000, 8_678_000)
