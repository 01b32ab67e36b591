"""Others on the same GPU."""

from __future__ import annotations

import pytest
from recorded_cases import recorded

from stepscope.errors import Unavailable
from stepscope.findings.rules.machine import other_process

GIB = 1 << 30
MEMORY = {
    "peak_allocated_bytes": 9 * GIB,
    "peak_reserved_bytes": 10 * GIB,
    "driver_used_bytes": 14 * GIB,
    "driver_total_bytes": 80 * GIB,
    "num_allocator_retries": 0,
    "peak_resident_bytes": GIB,
}


def beside(folder, *processes, memory=MEMORY):
    return other_process(
        recorded(folder, [10.0] * 8, is_gpu=True, counters={"other_processes": list(processes)}, memory=memory)
    )


def test_another_process(tmp_path):
    (finding,) = beside(tmp_path, {"pid": 77, "name": "jupyter", "used_bytes": 3 * GIB})

    assert finding.saving_bytes == 3 * GIB
    assert "Another process held 3.00 GiB" in finding.sentence
    assert "jupyter (pid 77)" in finding.sentence


def test_the_run_itself_under_another_number_as_in_a_container(tmp_path):
    assert beside(tmp_path, {"pid": 1, "name": None, "used_bytes": 11 * GIB}) == []


def test_nobody_else(tmp_path):
    assert beside(tmp_path) == []


def test_a_process_without_figures_may_be_the_run_itself(tmp_path):
    with pytest.raises(Unavailable, match="may be this run"):
        beside(tmp_path, {"pid": 1, "name": None, "used_bytes": None})


def test_without_nvml(tmp_path):
    with pytest.raises(Unavailable, match="NVML"):
        other_process(recorded(tmp_path, [10.0] * 8, is_gpu=True))
