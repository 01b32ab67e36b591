"""Memory taken and given back in each step is found; a cache that fills is not; retries come from the recording."""

from __future__ import annotations

import pytest
from host_cases import case_of, kernel, recorded, steps

from handmade import gpu_facts
from stepscope.errors import Unavailable
from stepscope.findings.rules.memory import allocator_churn
from trace_builder import TraceBuilder


def churning(trace: TraceBuilder, at: float, frees: int = 1) -> float:
    """3 ms of GPU, 0.6 ms for memory and, maybe, 2 ms for giving it back, on a host that has nothing ahead."""
    trace.op("aten::empty", at, 620).call("cudaMalloc", at + 10, 600)
    kernel(trace, at + 620, runs=at + 630, took=3000)
    trace.call("cudaDeviceSynchronize", at + 700, 2930)
    for _ in range(frees):
        trace.call("cudaFree", at + 3700, 2000)
    return 3800 + 2000 * frees


def test_memory_given_back_in_each_step():
    (finding,) = allocator_churn(case_of(steps(churning)))

    assert finding.saving_ns == 600_000 + 2_000_000
    assert "1 time and returns it 1 time" in finding.sentence and "cudaFree" in finding.sentence
    assert "2.60 ms per step (45 % of 5.80 ms)" in finding.sentence
    assert "empty_cache" in finding.fix and finding.confidence == "high"


def test_memory_taken_in_each_step_and_never_given_back():
    (finding,) = allocator_churn(case_of(steps(lambda trace, at: churning(trace, at, frees=0))))

    assert finding.saving_ns == 600_000
    assert finding.fix.startswith("keep tensor sizes")


def test_a_cache_that_fills_is_first_call_cost():
    assert allocator_churn(case_of(steps(lambda trace, at: churning(trace, at, frees=0), num=1))) == []


def test_a_step_without_such_calls_is_clean():
    trace = steps(lambda trace, at: (kernel(trace, at, runs=at + 10, took=500), 1000.0)[1])

    assert allocator_churn(case_of(trace)) == []


def test_retries_of_every_step_are_told_and_one_is_not(tmp_path):
    memory = gpu_facts()["memory"]
    often = recorded(tmp_path / "often", memory={**memory, "num_allocator_retries": 5})
    once = recorded(tmp_path / "once", memory={**memory, "num_allocator_retries": 1})

    (finding,) = allocator_churn(case_of(None, often))

    assert "5 times in 6 steps with 12.0 GiB of 140 GiB reserved" in finding.sentence
    assert finding.saving_ns is None
    assert allocator_churn(case_of(None, once)) == []


def test_without_gpu_work_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="no GPU work"):
        allocator_churn(case_of(TraceBuilder().step(1, 0, 100).op("aten::mm", 0, 50)))
