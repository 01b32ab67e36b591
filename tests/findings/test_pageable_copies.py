"""Large copies from pageable memory are found; pinned, small and rare ones are not."""

from __future__ import annotations

import pytest
from host_cases import case_of, copy, kernel, steps

from stepscope.errors import Unavailable
from stepscope.findings.rules.waits import pageable_copies, synchronization
from trace_builder import TraceBuilder

BYTES = 50_000_000
"""A millisecond at 50 GB/s."""


def batch_first(trace: TraceBuilder, at: float, memory: str = "Pageable", num_bytes: int = BYTES) -> float:
    """A batch that takes 5 ms to come, at 10 GB/s, with the host waiting; then 3 ms of GPU, timed."""
    copy(trace, f"HtoD ({memory} -> Device)", at, 5010, (at + 10, 5000), num_bytes, "aten::to")
    trace.call("cudaStreamSynchronize", at + 10, 5000)
    kernel(trace, at + 5100, runs=at + 5110, took=3000)
    trace.call("cudaDeviceSynchronize", at + 5200, 2920)
    return 8150


def test_a_batch_from_pageable_memory():
    case = case_of(steps(batch_first))

    (finding,) = pageable_copies(case)

    # The copy takes 1 ms from 10 µs on, the kernel follows after a pause, the host ends 30 µs after its sync. In 8.15
    # ms as traced, of which 10 µs are the sync's own.
    assert finding.saving_ns == pytest.approx(
        8_150_000 - (10_000 + 1_000_000 + 1_500 + 3_000_000 + 40_000), abs=12_000
    )
    assert "47.7 MiB" in finding.sentence and "1 transfer at 10.0 GB/s" in finding.sentence
    assert "pin_memory=True" in finding.fix and "50 GB/s" in finding.derived
    assert synchronization(case) == []


def test_pinned_memory_is_clean():
    assert pageable_copies(case_of(steps(lambda trace, at: batch_first(trace, at, "Pinned")))) == []


def test_a_few_bytes_are_no_batch():
    trace = steps(lambda trace, at: batch_first(trace, at, num_bytes=1000))

    assert pageable_copies(case_of(trace)) == []


def test_without_gpu_work_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="no GPU work"):
        pageable_copies(case_of(TraceBuilder().step(1, 0, 100).op("aten::mm", 0, 50)))
