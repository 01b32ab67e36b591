"""Ceilings on the CPU: exact arithmetic on a fake clock, and one real, tiny run."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.recorder.machine import ceilings


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(ceilings, "CPU_SIZES", (16, 32, 64))
    monkeypatch.setattr(ceilings, "last_level_cache_bytes", lambda: 1 << 16)


def measure(seconds=0.03, **options):
    return ceilings.measure_ceilings("cpu", seconds=seconds, **options)


def test_a_real_run_measures_what_the_cpu_has():
    asked = []
    measured = measure(progress=asked.append)

    assert measured["matmul_flops"].keys() | measured["left_out"].keys() == {"fp32", "tf32", "bf16", "fp16"}
    assert measured["left_out"]["tf32"] == "only on CUDA devices"
    assert measured["matmul_flops"]["fp32"] > 0
    assert set(measured["matmul_sizes"].values()) <= {16, 32, 64}
    assert measured["copy_bytes_per_s"] > 0
    assert measured["torch_version"] == torch.__version__
    assert asked == ["matmul fp32", "matmul bf16", "matmul fp16", "copy"]


def test_the_rates_are_operations_and_bytes_over_time(monkeypatch):
    monkeypatch.setattr(ceilings, "_median_ns", lambda run, device, budget_ns: 1_000.0)
    measured = measure(seconds=1.0)

    assert measured["matmul_flops"]["fp32"] == 2 * 64**3 * 10**6
    assert measured["matmul_sizes"]["fp32"] == 64
    assert measured["copy_bytes_per_s"] == 2 * 4 * (1 << 16) * 10**6


def test_a_slow_machine_stops_before_the_larger_sizes(monkeypatch):
    monkeypatch.setattr(ceilings, "_median_ns", lambda run, device, budget_ns: 1e9)

    assert measure()["matmul_sizes"] == {"fp32": 16, "bf16": 16, "fp16": 16}


def test_the_best_size_wins(monkeypatch):
    times_ns = iter([10.0, 10.0, 1_000_000.0])
    monkeypatch.setattr(ceilings, "_median_ns", lambda run, device, budget_ns: next(times_ns))

    flops, size = ceilings._best_matmul("fp32", torch.device("cpu"), 1.0)

    assert (flops, size) == (2 * 32**3 * 10**8, 32)


def test_operands_are_random_and_of_the_dtype(monkeypatch):
    seen = []
    multiply = torch.mm

    def watched(left, right, out):
        seen.append((left.dtype, bool(left.std() > 0.5), bool(right.std() > 0.5)))
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    measure()

    assert set(seen) == {(dtype, True, True) for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def test_a_dtype_that_fails_is_left_out_with_its_reason(monkeypatch):
    multiply = torch.mm

    def no_half(left, right, out):
        if left.dtype == torch.float16:
            raise RuntimeError('"addmm_impl_cpu_" not implemented for Half\nmore')
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", no_half)
    measured = measure()

    assert measured["left_out"]["fp16"] == '"addmm_impl_cpu_" not implemented for Half'
    assert measured["matmul_flops"].keys() == {"fp32", "bf16"}


def test_random_state_and_precision_are_left_as_found():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    try:
        measure()
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_fp32_runs_without_reduced_precision(monkeypatch):
    seen = []
    multiply = torch.mm

    def watched(left, right, out):
        seen.append(torch.get_float32_matmul_precision())
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    torch.set_float32_matmul_precision("high")
    try:
        measure()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}


def test_the_median_is_of_as_many_rounds_as_fit(monkeypatch):
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(ceilings.time, "perf_counter_ns", lambda: next(clock))
    calls = []

    assert ceilings._median_ns(lambda: calls.append(1), torch.device("cpu"), 1_000) == 100
    assert len(calls) == ceilings.WARM_UP_ROUNDS + 1 + 10


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="cuda or cpu"):
        ceilings.measure_ceilings("meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reaches_more_in_bf16_than_in_fp32():
    measured = ceilings.measure_ceilings("cuda", seconds=0.5)

    assert measured["matmul_flops"]["bf16"] > 2 * measured["matmul_flops"]["fp32"]
    assert measured["copy_bytes_per_s"] > 10**11
