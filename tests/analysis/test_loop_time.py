"""What lies between steps, per step: what is start-up, what is cold, how often it happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from handmade import MS, cpu_facts, sample, write_recording
from stepscope.analysis.time.loop_time import loop_time
from stepscope.trace.recording import Aside, read_recording


@pytest.fixture
def loop(tmp_path):
    """Return the time of 12 steps of 10 ms with evaluations of so many ms: before them, before a step, after them."""

    def measured(lead=0, tail=0, exit_after=None, **before):
        steps = [sample(step) for step in range(12)]
        for name, ms in before.items():
            step = steps[int(name.removeprefix("step"))]
            step["host_ns"] = {**step["host_ns"], "evaluation": ms * MS}
            step["wall_ns"] += ms * MS
        facts = cpu_facts(command={"argv": ["train.py"], "exit_after": exit_after})
        recording = read_recording(write_recording(tmp_path / "run", facts, steps))
        return loop_time(replace(recording, lead=aside(lead), tail=aside(tail)), on_device=False)

    def aside(ms):
        return Aside(0, ms * MS, {"evaluation": ms * MS}, {"evaluation": 1}) if ms else None

    return measured


def test_what_happens_only_before_the_first_step_is_start_up(loop):
    found = loop(lead=600)

    assert (found.step_ns, dict(found.between_ns), found.caveat) == (10 * MS, {}, None)
    assert {row.name: row.ns for row in found.rows}["evaluation"] == 600 * MS  # and the rows still have it
    assert "how often is unknown" in loop(lead=600, exit_after=12).caveat


def test_the_first_of_several_is_cold_and_the_later_ones_tell_their_length(loop):
    """300, 60 and 60 ms in 12 steps: three of 60."""
    assert loop(step3=300, step6=60, step9=60).between_ns == {"evaluation": 15 * MS}


def test_a_run_that_was_stopped_tells_how_often_by_the_distance_from_first_to_last(loop):
    """Every fourth step: before step 2, 6 and 10, and the run ends in the middle of a period."""
    assert loop(step2=60, step6=60, step10=60, exit_after=12).between_ns == {"evaluation": 15 * MS}


def test_one_evaluation_after_the_last_step_belongs_to_the_run(loop):
    assert loop(tail=120).between_ns == {"evaluation": 10 * MS}
    assert loop(tail=120, exit_after=12).between_ns == {}
