"""Kernels by name, class, size and phase; launches, latency and the queue: exact on small traces, sums on any."""

from __future__ import annotations

import pytest
from hypothesis import given

from any_trace import any_trace
from stepscope.analysis.kernels.kernels import (
    SIZES,
    device_phases,
    gemm_share_by_phase,
    kernel_classes,
    kernel_sizes,
    launches,
    queue_depth_over_time,
    top_kernels,
)
from stepscope.analysis.ranks.rank_account import step_table
from stepscope.analysis.time.gpu_time import gpu_time
from trace_builder import TraceBuilder

COPY = "Memcpy HtoD"


def test_kernels_by_name_have_their_calls_quantiles_and_share():
    # GIVEN five calls of 1, 2, 3, 4 and 90 µs, two of 5 µs each, and a copy of 90 µs
    trace = TraceBuilder()
    for position, duration in enumerate((4, 1, 90, 3, 2)):
        trace.kernel("my_gemm", 1000 * position, duration)
    trace.kernel("softmax_kernel", 7000, 5).kernel("softmax_kernel", 8000, 5).memcpy(9000, 90)

    table = top_kernels(trace.linked().device)

    assert table.drop("share").rows() == [
        ("my_gemm", "gemm", 5, 100_000, 20_000.0, 3_000, 90_000),
        (COPY, "memset_memcpy", 1, 90_000, 90_000.0, 90_000, 90_000),
        ("softmax_kernel", "softmax", 2, 10_000, 5_000.0, 5_000, 5_000),
    ]
    assert table["share"].to_list() == [0.5, 0.45, 0.05]


def test_p99_is_the_hundredth_of_a_hundred_and_one():
    trace = TraceBuilder()
    for duration in range(1, 102):
        trace.kernel("a", 1000 * duration, duration)

    assert top_kernels(trace.linked().device).select("p50_ns", "p99_ns").row(0) == (51_000, 100_000)


def test_names_of_equal_time_come_in_alphabetical_order():
    device = TraceBuilder().kernel("b", 0, 5).kernel("a", 10, 5).kernel("c", 20, 6).linked().device

    assert top_kernels(device)["name"].to_list() == ["c", "a", "b"]


def test_a_kernels_class_is_told_by_the_op_that_launched_it():
    trace = TraceBuilder().op("aten::convolution", 0, 10).launch("volta_sgemm", 1, (20, 30))
    trace.op("aten::mm", 10, 10).launch("volta_sgemm", 11, (60, 10)).kernel("what is this", 90, 2).memset(95, 1)

    assert kernel_classes(trace.linked().device).drop("share").rows() == [
        ("convolution", 1, 30_000),
        ("gemm", 1, 10_000),
        ("other", 1, 2_000),
        ("memset_memcpy", 1, 1_000),
    ]


@pytest.mark.parametrize(
    ("duration", "size"),
    [
        (0, 0), (4.999, 0), (5, 1), (19.999, 1), (20, 2), (99.999, 2), (100, 3), (999.999, 3), (1000, 4), (5000, 4),
    ],
)  # fmt: skip
def test_a_kernel_of_a_border_is_of_the_larger_size(duration, size):
    table = kernel_sizes(TraceBuilder().kernel("a", 0, duration).memcpy(9000, 1).linked().device)

    assert table["size"].to_list() == list(SIZES)
    assert table["num_kernels"].to_list() == [int(i == size) for i in range(5)]
    assert table["total_ns"].sum() == round(duration * 1000)


def test_the_share_of_gemms_is_told_by_phase():
    trace = TraceBuilder().annotation("forward", 0, 50).annotation("backward", 50, 50)
    trace.launch("gemm", 10, (100, 30)).launch("softmax", 20, (130, 10)).launch("gemm", 60, (150, 5))
    table = gemm_share_by_phase(trace.linked().device)

    assert table.rows() == [("forward", 40_000, 30_000, 0.75), ("backward", 5_000, 5_000, 1.0)]


# -- launches ---------------------------------------------------------------------------------------------------


def test_launches_a_step_are_the_kernels_that_steps_launched():
    # GIVEN three kernels of two steps, one of neither, and a copy
    trace = TraceBuilder().step(1, 0, 100).step(2, 100, 100).op("aten::mm", 5, 5)
    trace.launch("a", 10, (20, 5)).launch("a", 12, (30, 5)).launch("a", 110, (120, 5)).launch("a", 300, (310, 5))
    found = launches(trace.memcpy(150, 5).linked())

    assert found["num_kernels"] == 4
    assert found["num_kernel_launches_per_step"] == 1.5


def test_a_kernel_without_a_launch_is_none_of_the_steps_in_which_it_starts():
    # GIVEN a step that launches one kernel, while two run that were launched before the trace began
    trace = TraceBuilder().step(1, 0, 100).launch("a", 10, (80, 5)).kernel("b", 20, 5).kernel("b", 30, 5)
    linked = trace.linked()
    found = launches(linked)

    # THEN they are counted apart
    assert (found["num_kernels"], found["num_unlaunched_kernels"]) == (3, 2)
    assert found["num_kernel_launches_per_step"] == 1
    assert step_table(linked).select("num_kernels", "gpu_busy_ns").row(0) == (1, 15_000)


def test_without_steps_there_are_no_launches_a_step():
    assert launches(TraceBuilder().launch("a", 10, (20, 5)).linked())["num_kernel_launches_per_step"] is None


def test_latency_is_from_the_start_of_the_call_to_the_start_of_the_kernel():
    trace = TraceBuilder()
    for position, latency in enumerate((3, 7, 100)):
        trace.launch("a", 1000 * position, (1000 * position + latency, 5), took=2)
    found = launches(trace.kernel("no launch", 5000, 5).linked())

    assert (found["latency_p50_ns"], found["latency_p99_ns"], found["num_before_launch"]) == (7_000, 100_000, 0)


def test_a_kernel_before_its_launch_has_no_latency_and_is_counted():
    trace = TraceBuilder().launch("a", 100, (97, 5)).launch("a", 200, (199, 5)).launch("a", 300, (300, 5))
    found = launches(trace.linked())

    assert (found["latency_p50_ns"], found["latency_p99_ns"], found["num_before_launch"]) == (0, 0, 2)


def test_kernels_of_graphs_are_counted_with_their_launches():
    trace = TraceBuilder().launch("a", 0, [(10, 5), (15, 5), (20, 5)], call="cudaGraphLaunch")
    trace.launch("a", 50, [(60, 5)], call="cudaGraphLaunch").launch("b", 70, (80, 5))
    found = launches(trace.linked())

    assert (found["num_kernels"], found["num_graph_kernels"], found["num_graph_launches"]) == (5, 4, 2)


def test_the_queue_at_a_launch_is_what_was_launched_before_and_has_not_finished():
    # GIVEN three launches in a row, and two that find nothing before them
    trace = TraceBuilder().launch("a", 0, (5, 10)).launch("a", 1, (15, 5)).launch("a", 2, (20, 5))
    found = launches(trace.launch("a", 30, (31, 1)).launch("a", 40, (41, 1)).linked())

    assert (found["queue_depth_p50"], found["queue_depth_max"], found["starved_share"]) == (0, 2, 0.6)


def test_a_kernel_that_ended_before_its_own_launch_takes_nothing_from_the_queue():
    trace = TraceBuilder().launch("real", 8, (20, 10)).launch("skewed", 10, (2, 3))

    assert launches(trace.linked())["queue_depth_max"] == 1


def test_without_kernels_there_is_no_latency_and_no_queue():
    found = launches(TraceBuilder().op("aten::mm", 0, 5).linked())

    assert found["num_kernels"] == found["num_before_launch"] == found["num_graph_launches"] == 0
    assert found["latency_p50_ns"] is found["queue_depth_max"] is found["starved_share"] is None


def test_the_queue_over_time_is_what_is_launched_and_not_finished():
    linked = TraceBuilder().launch("a", 0, (5, 15)).launch("b", 10, (20, 30)).linked()

    assert queue_depth_over_time(linked, 5).rows() == [(0, 1), (10_000, 2), (20_000, 1), (30_000, 1), (40_000, 1)]
    assert queue_depth_over_time(TraceBuilder().op("aten::mm", 0, 5).linked()).is_empty()


# -- any trace --------------------------------------------------------------------------------------------------


@given(any_trace())
def test_every_breakdown_adds_up_to_all_gpu_work(trace):
    linked = trace.linked()
    device = linked.device
    whole = int(device["duration_ns"].sum())
    kernels = int((device["kind"] == "kernel").sum())

    for table in (top_kernels(device), kernel_classes(device)):
        assert int(table["total_ns"].sum()) == whole and int(table["num_calls"].sum()) == device.height
        assert not whole or table["share"].sum() == pytest.approx(1)
    assert int(gemm_share_by_phase(device)["total_ns"].sum()) == whole
    assert int(kernel_sizes(device)["num_kernels"].sum()) == kernels == launches(linked)["num_kernels"]
    assert int(device_phases(linked)["busy_ns"].sum()) == gpu_time(device).busy_ns
    assert int(device_phases(linked)["num_kernels"].sum()) == kernels
