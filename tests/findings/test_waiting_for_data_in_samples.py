"""Waiting for data without a trace of GPU work: the samples' phases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_cases import GPU, recorded

from handmade import MS, cpu_facts, sample, write_recording
from stepscope.analysis.time.summary import CounterSummary, Gauge
from stepscope.errors import Unavailable
from stepscope.findings.rules.step_times import host_work_between_steps, waiting_for_data
from stepscope.session import open_session


def phases(folder, data_ms, label="data", device_data_ms=None):
    """Steps of 10 ms, so many of them for data."""
    device = {}
    if device_data_ms is not None:
        device = {"device_ns": {label: device_data_ms * MS, "forward": (10 - device_data_ms) * MS}}
    lines = [
        sample(i, host_ns={label: int(data_ms * MS), "forward": int((10 - data_ms) * MS)}, **device) for i in range(8)
    ]  # fmt: skip
    facts = {"environment": GPU} if device else {}
    return open_session(write_recording(folder, cpu_facts(trace=None, **facts), lines), use_cache=False).case


@pytest.mark.parametrize(
    ("label", "told", "other"),
    [
        ("data", waiting_for_data, host_work_between_steps),
        ("before_forward", host_work_between_steps, waiting_for_data),
    ],
)
def test_without_a_data_loader_it_is_not_called_data(tmp_path, label, told, other):
    case = phases(tmp_path, 4, label)
    (finding,) = told(case)

    assert finding.saving_ns == 4e6 and other(case) == []
    assert finding.confidence == ("high" if label == "data" else "medium")
    assert "4.00 ms per step (40 % of 10.0 ms)" in finding.sentence
    assert ("waits" in finding.sentence) == (label == "data"), "unknown without a DataLoader"


def test_little_of_a_step_on_a_processor(tmp_path):
    assert waiting_for_data(phases(tmp_path, 0.4)) == []


def test_a_tenth_of_a_step_has_its_own_name_and_is_not_unexplained(tmp_path):
    (finding,) = waiting_for_data(phases(tmp_path, 1))
    assert finding.saving_ns == 1e6


def test_data_that_comes_while_the_gpu_still_works(tmp_path):
    assert waiting_for_data(phases(tmp_path, 5, device_data_ms=0)) == []


def test_a_gpu_that_stands(tmp_path):
    assert waiting_for_data(phases(tmp_path, 5, device_data_ms=5))[0].saving_ns == 5e6


@pytest.mark.parametrize(("busy", "saving"), [(0.99, None), (0.8, 2e6), (0.2, 5e6)])
def test_without_device_times_it_is_at_most_the_idle_time_of_the_gpu(tmp_path, busy, saving):
    """A host that waits before its forward may wait for the GPU, as `.to(device)` does."""
    case = phases(tmp_path, 5)
    gauge = Gauge(busy, busy)
    counters = CounterSummary(9, gauge, None, None, None, None, (), None)
    case.__dict__["summary"] = replace(case.summary, counters=counters)

    assert [found.saving_ns for found in waiting_for_data(case)] == (
        [] if saving is None else [pytest.approx(saving)]
    )


def test_without_clean_steps(tmp_path):
    with pytest.raises(Unavailable):
        waiting_for_data(recorded(tmp_path, []))
