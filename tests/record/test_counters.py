"""The counter thread: its lines, its manners when things break, and what a forked child may do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_nvml import UUID, build_fake_nvml

from stepscope.recorder.machine import counters
from stepscope.recorder.machine.counters import CounterSampler
from stepscope.recorder.machine.nvml import NvmlUnavailable

SOURCE_FOLDER = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def start(tmp_path, library):
    samplers = []

    def begin(interval_seconds=0.002):
        samplers.append(CounterSampler.start(tmp_path / "counters.jsonl", UUID, interval_seconds, library))
        return samplers[-1]

    yield begin
    for sampler in samplers:
        sampler.stop()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition):
    while not condition():  # the suite's timeout ends a wait that never comes true
        time.sleep(0.005)


def test_a_line_a_sample(tmp_path, start, monkeypatch):
    monkeypatch.setattr(counters, "FLUSH_NS", 0)
    monkeypatch.setenv("FAKE_NVML_THROTTLE", "4")
    path = tmp_path / "counters.jsonl"

    before_ns = time.perf_counter_ns()
    sampler = start()
    wait_for(lambda: len(lines_of(path)) >= 3)
    sampler.stop()
    after_ns = time.perf_counter_ns()

    lines = lines_of(path)
    times_ns = [line.pop("t_ns") for line in lines]
    assert before_ns < times_ns[0] and times_ns[-1] < after_ns
    assert times_ns == sorted(set(times_ns))
    assert sampler.error is None
    assert all(
        line
        == {
            "gpu_busy_share": 0.97,
            "memory_controller_busy_share": 0.4,
            "power_watts": 512.345,
            "energy_joules": 9876543210.123,
            "sm_clock_mhz": 1980,
            "memory_clock_mhz": 3201,
            "throttle": ["sw_power_cap"],
            "driver_memory_bytes": 81_604_378_624,
        }
        for line in lines
    )


def test_lines_are_on_disk_long_before_the_end(tmp_path, start, monkeypatch):
    monkeypatch.setattr(counters, "FLUSH_NS", 50_000_000)
    start()

    wait_for(lambda: len(lines_of(tmp_path / "counters.jsonl")) >= 5)


def test_stop_writes_what_is_left_and_may_be_called_twice(tmp_path, start, monkeypatch):
    monkeypatch.setattr(counters, "FLUSH_NS", 10**18)
    sampler = start()
    wait_for(lambda: len(sampler._pending) >= 2)
    assert len(lines_of(tmp_path / "counters.jsonl")) == 1  # the first is written at once

    sampler.stop()
    written = (tmp_path / "counters.jsonl").read_bytes()
    sampler.stop()

    lines = lines_of(tmp_path / "counters.jsonl")
    assert len(lines) >= 4
    assert [index for index, line in enumerate(lines) if "energy_joules" in line] == [0, len(lines) - 1]
    assert (tmp_path / "counters.jsonl").read_bytes() == written
    assert not sampler._thread.is_alive()
    assert sampler.other_processes() == []


def test_counters_that_are_not_offered_are_absent(tmp_path, start, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_CODE", "3")
    monkeypatch.setattr(counters, "FLUSH_NS", 0)
    start()

    wait_for(lambda: lines_of(tmp_path / "counters.jsonl"))
    assert list(lines_of(tmp_path / "counters.jsonl")[0]) == ["t_ns"]


def test_a_gpu_that_is_lost_ends_the_sampling_quietly(tmp_path, start, monkeypatch):
    sampler = start()
    wait_for(lambda: sampler._pending)
    monkeypatch.setenv("FAKE_NVML_CODE", "15")
    sampler._thread.join()

    assert isinstance(sampler.error, NvmlUnavailable)
    assert "GPU is lost" in str(sampler.error)
    assert lines_of(tmp_path / "counters.jsonl")
    assert sampler.other_processes() == []


def test_other_processes_leave_out_our_own(start):
    processes = start().other_processes()

    assert len(processes) == 19
    assert processes[0] == {"pid": 4242, "name": "python train.py", "used_bytes": 1 << 33}


def test_stop_does_not_wait_for_a_driver_that_hangs(start, monkeypatch):
    monkeypatch.setattr(counters, "JOIN_SECONDS", 0.05)
    monkeypatch.setenv("FAKE_NVML_SLEEP_MS", "400")
    sampler = start()
    time.sleep(0.05)
    sampler.stop()

    assert sampler._thread.is_alive()
    sampler._thread.join()
    assert sampler.error is None


def test_a_long_run_samples_less_often(start, monkeypatch):
    monkeypatch.setattr(counters, "STRETCH_SAMPLES", 2)
    sampler = start()

    wait_for(lambda: sampler._interval_ns >= 8_000_000)


def test_no_nvml_is_said_at_the_start(tmp_path):
    with pytest.raises(NvmlUnavailable):
        CounterSampler.start(tmp_path / "counters.jsonl", UUID, library_name="libthere-is-none.so")
    assert not (tmp_path / "counters.jsonl").exists()


def test_an_interval_of_nothing_is_refused(tmp_path, library):
    with pytest.raises(ValueError, match="interval_seconds"):
        CounterSampler.start(tmp_path / "counters.jsonl", UUID, 0, library)


def test_a_forked_child_neither_samples_nor_writes(tmp_path, library):
    path = tmp_path / "counters.jsonl"
    code = f"""
import os, sys, time, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads, which is the point here
sys.path.insert(0, {str(SOURCE_FOLDER)!r})
from stepscope.recorder.machine import counters

counters.FLUSH_NS = 10**18
sampler = counters.CounterSampler.start({str(path)!r}, {UUID!r}, 0.002, {library!r})
while len(sampler._pending) < 3:
    time.sleep(0.002)
size = os.path.getsize({str(path)!r})
child = os.fork()
if child == 0:
    sampler.stop()
    assert sampler.other_processes() == []
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert os.path.getsize({str(path)!r}) == size, "the child wrote the parent's lines"
sampler.stop()
assert sampler.error is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    times_ns = [line["t_ns"] for line in lines_of(path)]
    assert len(times_ns) >= 3
    assert len(set(times_ns)) == len(times_ns)
