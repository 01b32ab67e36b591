"""Tensors that go to the host and back are found as pairs; sizes and places that do not fit are not."""

from __future__ import annotations

import pytest
from host_cases import case_of, copy, kernel, steps

from stepscope.errors import Unavailable
from stepscope.findings.rules.waits import device_round_trip, pageable_copies, synchronization
from trace_builder import TraceBuilder

MIB = 1 << 20


def there_and_back(trace: TraceBuilder, at: float, back: int = 4 * MIB, between: int = 0) -> float:
    """2 ms of GPU, 4 MiB to the host in 1 ms, 3 ms of work there, back in 1 ms, 2 ms of GPU."""
    kernel(trace, at, runs=at + 10, took=2000)
    copy(trace, "DtoH (Device -> Pageable)", at + 100, 2910, (at + 2010, 1000), 4 * MIB, "aten::to")
    trace.call("cudaStreamSynchronize", at + 110, 2900)
    trace.op("aten::sort", at + 3010, 3000)
    for place in range(between):
        kernel(trace, at + 3100 + 30 * place, runs=at + 3110 + 30 * place, took=5)
    copy(trace, "HtoD (Pageable -> Device)", at + 6010, 1020, (at + 6020, 1000), back, "aten::to")
    trace.call("cudaStreamSynchronize", at + 6020, 1010)
    kernel(trace, at + 7100, runs=at + 7110, took=2000)
    trace.call("cudaDeviceSynchronize", at + 7200, 1920)
    return 9200


def test_the_trip_is_found_once_and_with_the_hosts_time():
    case = case_of(steps(there_and_back))

    (finding,) = device_round_trip(case)

    # Without it: 2 ms of GPU, a pause, 2 ms of GPU, for which the host waits; then 90 µs of its own.
    assert finding.saving_ns == 9_200_000 - (10_000 + 2_000_000 + 1_500 + 2_000_000 + 90_000)
    assert "1 tensor of up to 4.00 MiB" in finding.sentence
    assert "takes 6.93 ms per step" in finding.sentence
    assert finding.upper_bound and finding.confidence == "high"
    assert pageable_copies(case) == [] and synchronization(case) == []


def test_kernels_in_between_keep_the_hosts_time():
    (finding,) = device_round_trip(case_of(steps(lambda trace, at: there_and_back(trace, at, between=2))))

    # The last kernel is launched 2.91 and 1.02 ms sooner, at 3.17 ms: what the host did in between is still done.
    assert finding.saving_ns == 9_200_000 - (3_170_000 + 10_000 + 2_000_000 + 90_000)
    assert finding.confidence == "medium"


def test_another_size_is_another_tensor():
    assert device_round_trip(case_of(steps(lambda trace, at: there_and_back(trace, at, back=3 * MIB)))) == []


def test_what_comes_back_much_later_is_kept_there_on_purpose():
    assert device_round_trip(case_of(steps(lambda trace, at: there_and_back(trace, at, between=20)))) == []


def test_without_gpu_work_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="no GPU work"):
        device_round_trip(case_of(TraceBuilder().step(1, 0, 100).op("aten::mm", 0, 50)))
