"""The sentence at the top, made from the numbers and true of them."""

from __future__ import annotations

import dataclasses

import pytest

from handmade import MS, cpu_facts, cpu_recording, gpu_recording, sample, write_recording
from stepscope import read
from stepscope.document.verdict import verdict


@pytest.fixture(autouse=True)
def no_measured_ceilings(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))


def verdict_of(folder, samples=(), **facts) -> str:
    return read(write_recording(folder, cpu_facts(**facts), list(samples))).verdict


def test_a_cpu_step(tmp_path):
    assert read(cpu_recording(tmp_path / "run")).verdict == (
        "A step takes 10.00 ms (51,200 tokens/s): backward is the largest part (50.0 %); "
        "waiting for data takes 10.0 %."
    )


def test_a_gpu_that_waits(tmp_path):
    assert read(gpu_recording(tmp_path / "run")).verdict == (
        "A step takes 10.00 ms (51,200 tokens/s): the GPU is idle 15.0 % of it, mostly in data; "
        "backward is the largest part (45.0 %); 50.0 % MFU."
    )


def test_a_gpu_that_is_busy(tmp_path):
    trace = {"num_steps": 1, "num_kernels": 9, "gpu_busy_ns_by_phase": {"forward": 3 * MS, "backward": 7 * MS}}
    device_ns = {"forward": 3 * MS, "backward": 7 * MS}
    samples = [sample(step, device_ns=device_ns) for step in range(4)]

    assert "the GPU is busy 100.0 % of it; backward is the largest part (70.0 %)" in verdict_of(
        tmp_path / "run", samples, trace=trace
    )


def test_data_is_named_once_when_it_is_the_largest(tmp_path):
    samples = [sample(step, host_ns={"data": 8 * MS, "forward": 2 * MS}) for step in range(4)]

    assert verdict_of(tmp_path / "run", samples).endswith(": data is the largest part (80.0 %).")


def test_a_lower_bound_is_called_one(tmp_path):
    folder = gpu_recording(tmp_path / "run")
    card = read(folder)
    flops = dataclasses.replace(card.summary.flops, hidden="CUDA graphs")
    assert "; at least 50.0 % MFU" in verdict(card.recording, dataclasses.replace(card.summary, flops=flops))


def test_no_throughput_no_parenthesis(tmp_path):
    samples = [sample(step, num_tokens=None, num_samples=None) for step in range(4)]

    assert verdict_of(tmp_path / "run", samples).startswith("A step takes 10.00 ms: ")


def test_digits_follow_the_noise(tmp_path):
    samples = [sample(step, host_ns={"forward": (100 + 5 * step) * MS}) for step in range(5)]

    assert verdict_of(tmp_path / "run", samples).startswith("A step takes 110 ms (4,650 tokens/s)")


def test_too_few_steps_says_how_many_were_asked_for(tmp_path):
    """GIVEN 3 steps of a warm-up of 5 THEN both numbers are right."""
    said = verdict_of(tmp_path / "run", [sample(i, "warmup") for i in range(3)], windows={"warmup": 5, "clean": 20})

    assert "3 steps recorded" in said and "5 warm-up steps" in said


def test_steps_without_a_clean_window_are_not_called_warm_up(tmp_path):
    """GIVEN a run with no clean steps asked for THEN the sentence does not say that every step was warm-up."""
    windows = ["warmup", "warmup", "trace_warmup", "trace", "free"]
    said = verdict_of(
        tmp_path / "run",
        [sample(i, window) for i, window in enumerate(windows)],
        windows={"warmup": 2, "clean": 0, "trace_warmup": 1, "trace": 1},
    )

    assert "5 steps" in said and "warm-up" not in said


def test_a_script_that_never_imported_torch(tmp_path):
    folder = write_recording(tmp_path / "run", {"command": {"argv": ["hello.py"]}, "exit_code": 0}, [])

    assert read(folder).verdict.startswith("Nothing was measured: the script never imported torch.")


def test_a_script_that_was_killed_before_it_imported_torch(tmp_path):
    folder = write_recording(tmp_path / "run", {"command": {"argv": ["hello.py"]}, "status": "interrupted"}, [])

    assert "has not imported torch yet, or was stopped" in read(folder).verdict


def test_a_script_that_trains_in_other_processes(tmp_path):
    said = verdict_of(tmp_path / "run", num_child_processes=4)

    assert "4 processes it started" in said and "stepscope.record()" in said


def test_a_script_that_never_steps(tmp_path):
    said = verdict_of(tmp_path / "run")

    assert said.startswith("No step was found") and "stepscope.step()" in said
