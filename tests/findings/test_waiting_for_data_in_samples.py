"""Waiting for data without a trace of GPU work: the samples' phases."""

from __future__ import annotations

import pytest
from recorded_cases import GPU, recorded

from handmade import MS, cpu_facts, sample, write_recording
from stepscope.errors import Unavailable
from stepscope.findings.rules.step_times import waiting_for_data
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


@pytest.mark.parametrize(("label", "confidence"), [("data", "high"), ("before_forward", "medium")])
def test_a_processor_that_waits(tmp_path, label, confidence):
    (finding,) = waiting_for_data(phases(tmp_path, 4, label))

    assert finding.saving_ns == 4e6
    assert finding.confidence == confidence
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


def test_without_clean_steps(tmp_path):
    with pytest.raises(Unavailable):
        waiting_for_data(recorded(tmp_path, []))
