"""Short kernels on a busy GPU with free memory are found; long kernels, a late host and full memory are not."""

from __future__ import annotations

import pytest
from device_cases import Program
from host_cases import H200, case_of, recorded

from stepscope.errors import Unavailable
from stepscope.findings.rules.launches import small_batch
from trace_builder import TraceBuilder

GIB = 1 << 30


def graph(took: float, pause: float = 0.0, num: int = 2000, peak: int = GIB) -> TraceBuilder:
    """One call that launches so many kernels, as a CUDA graph does."""
    trace = TraceBuilder(**H200)
    runs = [(10 + number * (took + pause), took) for number in range(num)]
    trace.launch("kernel", 5, runs, call="cudaGraphLaunch")
    end = 10 + num * (took + pause)
    trace.call("cudaDeviceSynchronize", 7, end - 7)
    if peak:
        args = {"Device Type": 1, "Device Id": 0, "Addr": 1 << 40, "Bytes": peak, "Total Allocated": peak}
        trace.raw(ph="i", cat="cpu_instant_event", name="[memory]", pid=1, tid=1, ts=1, s="t", args=args)
    return trace.step(1, 0, end)


def test_short_kernels_take_more_data_for_nothing():
    (finding,) = small_batch(case_of(graph(took=3)))

    assert finding.saving_ns == pytest.approx(3_000_000, rel=0.01), "half of 6 ms"
    assert "Half of 2,000 kernels per step are shorter than 3.00 µs" in finding.sentence
    assert "of 140 GiB of memory is free" in finding.sentence and "batch_size" in finding.fix


def test_with_several_micro_batches_the_fix_is_fewer_of_them_and_verify_tries_it(tmp_path):
    folder = recorded(tmp_path / "run")
    (folder / "samples.jsonl").write_text(
        (folder / "samples.jsonl").read_text().replace('"num_micro_batches": 1', '"num_micro_batches": 8')
    )
    (finding,) = small_batch(case_of(graph(took=3), folder))

    assert finding.other_fix == "micro_batch" and "half as many micro-batches (8 now)" in finding.fix
    (alone,) = small_batch(case_of(graph(took=3), recorded(tmp_path / "other")))
    assert alone.other_fix == "" and "double batch_size" in alone.fix


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(graph(took=50), id="long kernels"),
        pytest.param(graph(took=3, pause=3), id="a GPU that waits"),
        pytest.param(graph(took=3, peak=100 * GIB), id="memory is full"),
    ],
)
def test_clean(trace):
    assert small_batch(case_of(trace)) == []


def test_without_memory_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="profile_memory=True"):
        small_batch(case_of(graph(took=3, peak=0)))


def test_one_long_kernel_is_a_full_device():
    program = Program()
    assert small_batch(program.case()) == []
