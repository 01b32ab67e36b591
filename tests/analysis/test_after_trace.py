"""Launches cost more once a GPU was traced: free steps are told without that, within what launches can cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from handmade import MS, gpu_facts, sample, write_recording
from stepscope.analysis.time.after_trace import MOST_LAUNCH_NS
from stepscope.analysis.time.loop_time import MEASURING, loop_time
from stepscope.trace.recording import read_recording

LAUNCHES = 500  # per step: at most 4 ms
JITTER = (0, 20_000, -10_000, 30_000, -30_000, 10_000)


@pytest.fixture
def recorded(tmp_path):
    """Return a recording: 12 clean steps of 10 ms, 2 traced ones, 40 free ones that are so many ms longer."""

    def write(longer_ms, launches=LAUNCHES, first_traced=12):
        lines = []
        for step in range(54):
            is_traced, is_clean = first_traced <= step < first_traced + 2, step < min(12, first_traced)
            passes = 10 * MS + JITTER[step % 6]
            if is_clean or is_traced:
                host_ns = {"data": MS, "forward": 4 * MS, "backward": passes - 5 * MS, "optimizer": 0}
                lines.append(sample(step, "trace" if is_traced else "clean", host_ns=host_ns))
            else:
                late = round(longer_ms * MS) if step > first_traced else 0
                lines.append(sample(step, "free", host_ns={"data": MS, "unattributed": passes - MS + late}))
        for before, line in pairwise(lines):
            line["start_ns"] = before["start_ns"] + before["wall_ns"]
        facts = gpu_facts()
        facts["trace"]["num_kernels"] = launches * facts["trace"]["num_steps"]
        return read_recording(write_recording(tmp_path / "run", facts, lines))

    return write


@pytest.mark.parametrize("longer_ms", [0.5, 2, 3.5])
def test_what_launches_cost_more_is_the_measurements(recorded, longer_ms):
    recording = recorded(longer_ms)
    loop = loop_time(recording, on_device=False)
    plain = loop_time(replace(recording, facts={**recording.facts, "trace": None}), on_device=False)

    assert loop.launch_cost_ns == pytest.approx(longer_ms * MS, abs=30_000)
    assert loop.step_ns == pytest.approx(10 * MS, rel=0.005)
    assert plain.step_ns > loop.step_ns + longer_ms * MS / 2
    rows, before = ({row.name: row.ns for row in found.rows} for found in (loop, plain))
    assert rows[MEASURING] - before[MEASURING] == pytest.approx(40 * loop.launch_cost_ns, rel=0.01)
    assert sum(rows.values()) == sum(before.values()) == loop.wall_ns


@pytest.mark.parametrize(
    ("longer_ms", "launches", "first_traced"),
    [
        pytest.param(LAUNCHES * MOST_LAUNCH_NS / MS + 0.5, LAUNCHES, 12, id="longer than launches can cost"),
        pytest.param(0.005, LAUNCHES, 12, id="within the noise"),
        pytest.param(-1, LAUNCHES, 12, id="shorter"),
        pytest.param(2, 0, 12, id="no launches"),
        pytest.param(2, LAUNCHES, 4, id="too few steps before the trace"),
    ],
)
def test_nothing_else_is_taken_for_it(recorded, longer_ms, launches, first_traced):
    assert loop_time(recorded(longer_ms, launches, first_traced), on_device=False).launch_cost_ns == 0
