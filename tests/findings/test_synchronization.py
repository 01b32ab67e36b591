"""Waits of the host in the middle of a step are found, with what they cost; a look at the loss, a clock are not."""

from __future__ import annotations

import pytest
from host_cases import H200, case_of, copy, kernel, steps

from stepscope.analysis.time.waits import mask_indexing
from stepscope.errors import Unavailable
from stepscope.findings.rules.waits import synchronization
from trace_builder import TraceBuilder


def read_in_the_middle(trace: TraceBuilder, at: float, caller: str | None = None, op: str = "aten::item") -> float:
    """4 ms of GPU, its value read, 0.98 ms of Python, 4 ms of GPU, the clock stopped."""
    kernel(trace, at, runs=at + 10, took=4000)
    if caller:
        trace.python(caller, at + 900, 3200).python("torch/_tensor.py(1): item", at + 950, 3100)
    copy(trace, "DtoH (Device -> Pinned)", at + 1000, 3020, (at + 4010, 2), 4, op)
    trace.call("cudaStreamSynchronize", at + 1010, 3010)
    kernel(trace, at + 5000, runs=at + 5010, took=4000)
    trace.call("cudaDeviceSynchronize", at + 5100, 3910)
    return 9100


def test_a_value_read_in_the_middle_costs_what_the_host_then_needs():
    (finding,) = synchronization(case_of(steps(read_in_the_middle)))

    # 9.1 ms; without the read the second kernel follows the first after a pause of 1.5 µs, and Python runs beside it.
    assert finding.saving_ns == 9_100_000 - (4_010_000 + 1_500 + 4_000_000 + 90_000)
    assert "stops 1 time per step to wait for the GPU, in aten::item in the forward" in finding.sentence
    assert "waits 3.00 ms, and then the GPU is idle for 998 µs" in finding.sentence
    assert finding.fix.startswith("keep the value on the GPU")
    (row,) = finding.evidence[0].rows
    assert (row["op"], row["num_calls"]) == ("aten::item", 1)


def test_stacks_name_the_caller():
    trace = steps(lambda trace, at: read_in_the_middle(trace, at, "train.py(41): log_norms"))

    (finding,) = synchronization(case_of(trace))

    assert "aten::item in train.py(41): log_norms" in finding.sentence


def test_a_count_needs_no_value_on_the_host():
    (finding,) = synchronization(case_of(steps(lambda trace, at: read_in_the_middle(trace, at, op="aten::bincount"))))

    assert "scatter_add_" in finding.fix


def norms_one_by_one(trace: TraceBuilder, at: float, num: int = 5) -> float:
    """A kernel of 1 ms, then norms of 5 µs, each read: 100 µs of the host a norm; then 1 ms more."""
    kernel(trace, at, runs=at + 10, took=1000)
    for number in range(num):
        begin = at + 1100 + 100 * number
        kernel(trace, begin, runs=begin + 10, took=5, op="aten::linalg_vector_norm")
        copy(trace, "DtoH (Device -> Pinned)", begin + 30, 50, (begin + 40, 2), 4, "aten::item")
        trace.call("cudaStreamSynchronize", begin + 40, 40)
    end = at + 1100 + 100 * num
    kernel(trace, end, runs=end + 10, took=1000)
    trace.call("cudaDeviceSynchronize", end + 100, 920)
    return 1100 + 100 * num + 1050


def test_norms_read_one_by_one_are_computed_as_one():
    (finding,) = synchronization(case_of(steps(norms_one_by_one)))

    # Of 100 µs a norm, 30 are neither the norm's nor the read's. The first norm, after another op, is left too: 20.
    # So the second kernel is launched at 1,270 µs, and ends 40 µs before its step.
    assert finding.saving_ns == 2_650_000 - (1_100_000 + 5 * 30_000 + 20_000 + 10_000 + 1_000_000 + 40_000)
    assert "stops 5 times per step" in finding.sentence


def test_a_few_norms_are_left_as_they_are():
    (finding,) = synchronization(case_of(steps(lambda trace, at: norms_one_by_one(trace, at, num=3))))

    assert finding.saving_ns < 3 * 100_000


def read_at_the_end(trace: TraceBuilder, at: float, before: float = 0) -> float:
    """GPU work ahead of the host all the time; the loss is read when all is given, and the next step begins late."""
    at += before
    kernel(trace, at, runs=at + 10, took=4000)
    kernel(trace, at + 100, runs=at + 4010, took=4000)
    copy(trace, "DtoH (Device -> Pinned)", at + 1000, 7020, (at + 8010, 2), 4, "aten::item")
    trace.call("cudaStreamSynchronize", at + 1010, 7010)
    return before + 8050


def test_the_loss_read_once_at_the_end_is_healthy():
    assert synchronization(case_of(steps(read_at_the_end))) == []
    # 0.4 ms of 8.45 would be worth telling of anything else: a step may look at its loss.
    assert synchronization(case_of(steps(lambda trace, at: read_at_the_end(trace, at, before=400), num=4))) == []


def test_the_loss_read_once_is_told_where_it_costs_a_tenth():
    trace = steps(lambda trace, at: read_at_the_end(trace, at, before=2000), num=4)

    (finding,) = synchronization(case_of(trace))

    # The first step still begins 2 ms late, and the last ends 40 µs after its work; all else follows at once.
    assert finding.saving_ns == pytest.approx((3 * 2_000_000) / 4, rel=0.1)


def timed(trace: TraceBuilder, at: float) -> float:
    """What starts and stops a clock, before a step and at its end."""
    trace.call("cudaDeviceSynchronize", at, 20)
    kernel(trace, at + 1000, runs=at + 1010, took=4000)
    trace.call("cudaDeviceSynchronize", at + 1100, 3910)
    return 5100


def test_a_step_that_is_timed_is_no_fault():
    assert synchronization(case_of(steps(timed))) == []


def test_a_profiler_that_begins_waits_for_what_was_queued():
    trace = TraceBuilder(**H200)
    trace.kernel("earlier", 0, 3000).call("cudaDeviceSynchronize", 100, 2910)
    for number in range(10):
        kernel(trace, 4000 + 100 * number, runs=4010 + 300 * number, took=300)
    trace.call("cudaDeviceSynchronize", 5000, 2015)

    assert synchronization(case_of(trace.step(1, 50, 7000))) == []


def timed_in_the_middle(trace: TraceBuilder, at: float) -> float:
    kernel(trace, at, runs=at + 10, took=4000)
    trace.call("cudaDeviceSynchronize", at + 100, 3920)
    kernel(trace, at + 5000, runs=at + 5010, took=4000)
    trace.call("cudaDeviceSynchronize", at + 5100, 3910)
    return 9100


def test_a_clock_stopped_in_the_middle_is():
    (finding,) = synchronization(case_of(steps(timed_in_the_middle)))

    assert finding.saving_ns == 9_100_000 - (4_010_000 + 1_500 + 4_000_000 + 90_000)
    assert "torch.cuda.Event" in finding.fix


def tensor_from_the_host(trace: TraceBuilder, at: float) -> float:
    """A few bytes to the GPU in the middle of a step: the copy is nothing, that the host waits for it is not."""
    kernel(trace, at, runs=at + 10, took=4000)
    copy(trace, "HtoD (Pageable -> Device)", at + 1000, 3020, (at + 4010, 2), 8, "aten::to")
    trace.call("cudaStreamSynchronize", at + 1010, 3010)
    kernel(trace, at + 5000, runs=at + 5010, took=4000)
    trace.call("cudaDeviceSynchronize", at + 5100, 3910)
    return 9100


def test_a_small_tensor_made_on_the_host_stops_the_step_too():
    (finding,) = synchronization(case_of(steps(tensor_from_the_host)))

    # The copy stays, after the first kernel as before; the second waits for it and a pause each.
    assert finding.saving_ns == pytest.approx(9_100_000 - (4_012_000 + 1_500 + 4_000_000 + 90_000), abs=2_000)
    assert finding.fix.startswith("create it on the GPU")


def test_without_gpu_work_nothing_is_waited_for():
    with pytest.raises(Unavailable, match="no GPU work"):
        synchronization(case_of(TraceBuilder().step(1, 0, 100).op("aten::mm", 0, 50)))


def chosen_by_mask(trace: TraceBuilder, at: float) -> float:
    """The host is the slower one: 20 µs of it for each of ten kernels, then 200 µs for `x[mask]`, of which the mask
    is counted for 150, and ten more kernels."""
    for number in range(10):
        kernel(trace, at + 30 * number, runs=at + 30 * number + 10, took=5)
    begin, number = at + 300, len(trace.events) + 1
    trace.op("aten::index", begin, 200, id=number).op("aten::nonzero", begin + 10, 150, id=number + 1)
    trace.launch("reduce", begin + 20, runs=(begin + 30, 4), took=10, id=number + 1)
    trace.launch(
        "Memcpy DtoH (Device -> Pinned)", begin + 40, runs=(begin + 50, 2), took=10, call="cudaMemcpyAsync",
        id=number + 1, bytes=8, category="gpu_memcpy",
    )  # fmt: skip
    trace.call("cudaStreamSynchronize", begin + 52, 10)
    trace.launch("gather", begin + 170, runs=(begin + 180, 8), took=10, id=number)
    for number in range(10):
        kernel(trace, begin + 210 + 30 * number, runs=begin + 220 + 30 * number, took=5)
    trace.call("cudaDeviceSynchronize", begin + 520, 10)
    return 850


def test_a_mask_costs_what_an_op_of_a_fixed_shape_would_not():
    (finding,) = synchronization(case_of(steps(chosen_by_mask)))

    # 200 µs of the host become the 20 of the other ops.
    assert finding.saving_ns == pytest.approx(180_000, abs=2_000)
    assert "Indexing with a mask, 1 time per step, keeps the host busy for 200 µs" in finding.sentence
    assert finding.fix.startswith("keep the shape fixed")


def test_indices_that_are_known_are_no_mask():
    def looked_up(trace: TraceBuilder, at: float) -> float:
        kernel(trace, at, runs=at + 10, took=100, op="aten::index")
        return 120

    assert mask_indexing(case_of(steps(looked_up)).linked).is_empty()


def worked_on_by_the_host(trace: TraceBuilder, at: float, num_bytes: int = 1 << 20) -> float:
    """4 ms of GPU, a tensor copied, 2.98 ms of a CPU op on it, 4 ms of GPU, the clock stopped."""
    kernel(trace, at, runs=at + 10, took=4000)
    copy(trace, "DtoH (Device -> Pageable)", at + 1000, 3020, (at + 4010, 2), num_bytes, "aten::to")
    trace.call("cudaStreamSynchronize", at + 1010, 3010)
    trace.op("aten::softmax", at + 4030, 2900)
    kernel(trace, at + 7000, runs=at + 7010, took=4000)
    trace.call("cudaDeviceSynchronize", at + 7100, 3910)
    return 11_100


def test_what_the_host_computes_with_a_copied_tensor_counts_until_its_next_launch():
    (finding,) = synchronization(case_of(steps(worked_on_by_the_host)))

    # The GPU has 8 ms of work: 3 ms are the host's, and all of the wait before them was lead that it lost.
    assert finding.saving_ns == pytest.approx(3_000_000, rel=0.02)
    assert "then works on 1 copied tensor for 2.98 ms" in finding.sentence
    assert finding.fix.startswith("compute on the GPU")


def test_a_value_is_no_tensor():
    (finding,) = synchronization(case_of(steps(lambda trace, at: worked_on_by_the_host(trace, at, 4))))

    assert "works on" not in finding.sentence
