"""Waiting for data in a trace: a loader, nothing at all, or a batch that the host prepares op by op."""

from __future__ import annotations

import pytest
from host_cases import case_of, kernel, steps

from stepscope.findings.diagnose import diagnose
from stepscope.findings.rules.launches import host_stall, launch_bound
from stepscope.findings.rules.step_times import waiting_for_data
from trace_builder import AUTOGRAD, TraceBuilder


def training(trace: TraceBuilder, at: float, num_ops: int, op_us: float = 90, label: str | None = None) -> float:
    """Ops on the CPU, 100 µs apart; then a forward and a backward of 2 ms each, an optimizer, and a clock."""
    for number in range(num_ops):
        trace.op(f"aten::{'index' if number % 4 else 'stack'}", at + 100 * number, op_us)
    at, begin = at + max(100 * num_ops, op_us + 10), at
    if label:
        trace.annotation(label, begin + 1, 100 * num_ops + 60)
    kernel(trace, at, runs=at + 10, took=2000)
    trace.op("autograd::engine::evaluate_function: MmBackward0", at + 100, 50, AUTOGRAD, sequence=len(trace.events))
    trace.launch("gemm", at + 110, runs=(at + 2010, 2000), thread=AUTOGRAD)
    trace.annotation("Optimizer.step#AdamW.step", at + 200, 100)
    kernel(trace, at + 210, runs=at + 4010, took=1000, op="aten::_fused_adamw_")
    trace.call("cudaDeviceSynchronize", at + 400, 4620)
    return at + 5030 - begin


def test_a_batch_that_is_prepared_op_by_op():
    case = case_of(steps(lambda trace, at: training(trace, at, num_ops=50), num=3))

    (finding,) = waiting_for_data(case)

    # 5 ms of ops; with what the host does around them until the first launch.
    assert finding.saving_ns == pytest.approx(5_000_000, rel=0.01)
    assert "in 50 ops, mostly aten::index" in finding.sentence
    assert "collate_fn" in finding.fix and finding.confidence == "medium"
    assert [round((end - start) / 1e6, 1) for start, end in finding.places] == [5.0] * 3
    assert host_stall(case) == launch_bound(case) == []
    assert diagnose(case).findings[0].id == "waiting_for_data"


def test_micro_batches_are_each_prepared():
    def two(trace: TraceBuilder, at: float) -> float:
        first = training(trace, at, num_ops=50)
        return first + training(trace, at + first, num_ops=50)

    (finding,) = waiting_for_data(case_of(steps(two)))

    assert finding.saving_ns == pytest.approx(10_000_000, rel=0.01)


def test_one_long_op_is_left_to_host_stall():
    case = case_of(steps(lambda trace, at: training(trace, at, num_ops=1, op_us=5000)))

    assert waiting_for_data(case) == []
    (finding,) = host_stall(case)
    assert "mostly in aten::stack on the CPU" in finding.sentence


def test_ops_of_a_forward_that_has_a_label_are_the_models_own():
    case = case_of(steps(lambda trace, at: training(trace, at, num_ops=50, label="forward")))

    assert waiting_for_data(case) == []


def test_ops_in_a_loader_are_the_loaders():
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    case = case_of(steps(lambda trace, at: training(trace, at, num_ops=50, label=name)))

    (finding,) = waiting_for_data(case)

    assert "for the DataLoader" in finding.sentence and finding.confidence == "high"
