"""Quiet stretches of the host are found where they cost; bookkeeping, the optimizer's own and data are not."""

from __future__ import annotations

import pytest
from host_cases import case_of, kernel, steps

from stepscope.errors import Unavailable
from stepscope.findings.rules.launches import host_stall
from trace_builder import AUTOGRAD, TraceBuilder

MS = 1000.0


def training(trace: TraceBuilder, at: float, quiet: float = 5 * MS, inside: str | None = None) -> float:
    """A forward and a backward of 2 ms each, an optimizer of 1 ms; then the host does something else."""
    kernel(trace, at, runs=at + 10, took=2000)
    number = len(trace.events)
    trace.op("autograd::engine::evaluate_function: MmBackward0", at + 100, 50, AUTOGRAD, sequence=number)
    trace.launch("gemm", at + 110, runs=(at + 2010, 2000), thread=AUTOGRAD)
    trace.annotation("Optimizer.step#AdamW.step", at + 200, 100)
    kernel(trace, at + 210, runs=at + 4010, took=1000, op="aten::_fused_adamw_")
    trace.call("cudaDeviceSynchronize", at + 400, 4620)
    if inside == "bookkeeping":
        for moment in range(0, int(quiet), 500):
            trace.memory(at + 5020 + moment, -512)
    elif inside:
        trace.op(inside, at + 5100, quiet - 200)
    return 5020 + quiet


def test_python_that_gives_the_gpu_nothing():
    (finding,) = host_stall(case_of(steps(training)))

    assert finding.saving_ns == 5_000_000
    assert "5.00 ms per step (50 % of 10.0 ms), in 1 pause, mostly in Python code outside" in finding.sentence
    assert finding.confidence == "medium"


def test_an_op_on_the_cpu_is_named():
    (finding,) = host_stall(case_of(steps(lambda trace, at: training(trace, at, inside="aten::topk"))))

    assert finding.saving_ns == 4_800_000  # as long as the op
    assert "mostly in aten::topk on the CPU" in finding.sentence and "aten::topk a CUDA tensor" in finding.fix


def test_stacks_name_the_function():
    def logged(trace: TraceBuilder, at: float) -> float:
        length = training(trace, at)
        trace.python("train.py(88): write_log", at + 5030, 4980).python("json/__init__.py(9): dump", at + 5040, 4900)
        return length

    (finding,) = host_stall(case_of(steps(logged)))

    assert "in train.py(88): write_log" in finding.sentence and finding.confidence == "high"


def test_tensors_given_back_are_work():
    assert host_stall(case_of(steps(lambda trace, at: training(trace, at, inside="bookkeeping")))) == []


def test_what_the_gpu_hides_costs_nothing():
    def hidden(trace: TraceBuilder, at: float) -> float:
        kernel(trace, at, runs=at + 10, took=6000)
        trace.call("cudaDeviceSynchronize", at + 4000, 2020)
        return 6100

    assert host_stall(case_of(steps(hidden))) == []


def test_a_stretch_in_one_step_of_many_is_left_to_others():
    lengths = iter([0.0, 0.0, 1.2 * MS, 0.0, 0.0])  # 0.24 ms a step, of 5.26
    trace = steps(lambda trace, at: training(trace, at, quiet=next(lengths)), num=5)

    assert host_stall(case_of(trace)) == []


def test_after_the_work_of_the_only_step_it_may_be_the_profiler():
    assert host_stall(case_of(steps(training, num=1))) == []


def test_without_steps_it_cannot_be_checked():
    trace = TraceBuilder()
    kernel(trace, 0, runs=10, took=500)
    with pytest.raises(Unavailable, match=r"prof\.step"):
        host_stall(case_of(trace))


def graph_given_back(trace: TraceBuilder, at: float, quiet: float = 1.2 * MS, is_let_go: bool = True) -> float:
    """A backward of 700 nodes; then nothing is seen for a while, until the loss is let go; then the optimizer."""
    kernel(trace, at, runs=at + 10, took=100)
    for node in range(700):
        trace.op("autograd::engine::evaluate_function: MulBackward0", at + 100 + 2 * node, 1, AUTOGRAD, sequence=node)
    end = at + 1500 + quiet
    trace.memory(at + 1500, -512)
    if is_let_go:
        trace.memory(end, -512)
    trace.annotation("Optimizer.step#AdamW.step", end, 1500)
    kernel(trace, end + 1400, runs=end + 1410, took=1000, op="aten::_fused_adamw_")
    trace.call("cudaDeviceSynchronize", end + 1500, 920)
    return 4000 + quiet


def test_a_graph_that_is_given_back_and_the_optimizers_own_python_are_work():
    assert host_stall(case_of(steps(graph_given_back))) == []


def test_after_the_backward_a_longer_stretch_or_one_that_ends_with_no_tensor_is_told():
    (longer,) = host_stall(case_of(steps(lambda trace, at: graph_given_back(trace, at, quiet=1.6 * MS))))
    (other,) = host_stall(case_of(steps(lambda trace, at: graph_given_back(trace, at, is_let_go=False))))

    assert longer.saving_ns == pytest.approx(1_600_000, abs=20_000)
    assert "the host launches nothing" in other.sentence.lower()
