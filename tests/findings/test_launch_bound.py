"""The host's time for launching leaves out what other rules tell of."""

from __future__ import annotations

from host_cases import case_of, kernel, steps

from stepscope.analysis.time.overhead import Overhead
from stepscope.findings.rules.launches import launch_bound
from trace_builder import TraceBuilder


def many_small(trace: TraceBuilder, at: float, stall: float = 0.0) -> float:
    """20 kernels of 5 µs, each launched after 100 µs of the host; before them, maybe, something else."""
    for number in range(20):
        begin = at + stall + 100 * number + 90
        kernel(trace, begin, runs=begin + 10, took=5)
    return stall + 2100


def test_the_time_of_launching():
    (finding,) = launch_bound(case_of(steps(many_small)))

    assert "needs 2.10 ms to launch 20 kernels per step" in finding.sentence
    assert sum(row["num_kernels"] for row in finding.evidence[1].rows) == 20, "of a step, as the sentence"
    # 2.1 ms, of which 2 % are left, and the GPU's own: 20 kernels with pauses, of which the first 10 µs after launch.
    assert finding.saving_ns > 1_900_000


def test_what_is_no_launching_is_left_out():
    (finding,) = launch_bound(case_of(steps(lambda trace, at: many_small(trace, at, stall=6000))))

    # From the last launch of a step to the first of the next it is 6.2 ms: a stall, told by others.
    (row,) = finding.evidence[0].rows
    assert row["host_ns"] < 2_100_000
    assert "of 8.10 ms" in finding.sentence


def test_no_host_saves_more_than_the_gpu_stood_idle():
    case = case_of(steps(many_small))
    assert case.starved_ns == 2_100_000 - 20 * 5_000

    case.__dict__["starved_ns"] = 50_000.0

    assert launch_bound(case) == []


def test_how_the_gpu_stood_in_other_steps_is_left_out():
    """In the first step, which is no typical one, a kernel that has been launched is held for 28 ms."""

    def after_one_that_was_held(trace: TraceBuilder, at: float) -> float:
        if at:
            return many_small(trace, at)
        kernel(trace, 0, runs=10, took=1000)
        kernel(trace, 100, runs=29_000, took=1000)
        return 30_000

    case = case_of(steps(after_one_that_was_held, num=4))

    assert case.num_steps == 3
    assert case.starved_ns == 2_100_000 - 20 * 5_000


def test_the_step_that_is_saved_from_is_the_one_without_the_profiler():
    case = case_of(steps(many_small))
    case.__dict__["overhead"] = Overhead(40_000.0)  # twice for each kernel: 20 µs of the host's 100 are left

    assert case.starved_ns == case.step.done_ns - 20 * 5_000 < 600_000
    (finding,) = launch_bound(case)
    assert finding.saving_ns <= case.starved_ns


def test_a_gpu_that_has_enough_to_do_is_clean():
    def large(trace: TraceBuilder, at: float) -> float:
        for number in range(20):
            kernel(trace, at + 20 * number, runs=at + 10 + 500 * number, took=500)
        trace.call("cudaDeviceSynchronize", at + 500, 9520)
        return 10_030

    assert launch_bound(case_of(steps(large))) == []
