"""Steps on one clock, the ones that took much longer, and how they are spread: exact figures from written samples."""

from __future__ import annotations

import pytest

from handmade import MS, cpu_facts, free_sample, gpu_recording, sample, write_recording
from stepscope.analysis.time.step_times import histogram, outliers, timed_steps
from stepscope.trace.recording import read_recording


def steps_of(folder, lines, clock="host", **facts):
    return timed_steps(read_recording(write_recording(folder, cpu_facts(**facts), lines)), clock)


def alike(num: int, first: int = 0, **fields):
    """Clean steps of 10 ms, and of 10.1 ms every other time."""
    phases = {"data": MS, "forward": 3 * MS, "backward": 5 * MS, "optimizer": MS}
    return [sample(first + i, host_ns={**phases, "forward": 3 * MS + i % 2 * MS // 10}, **fields) for i in range(num)]


def test_phases_sum_to_the_step_on_either_clock(tmp_path):
    for clock in ("host", "device"):
        steps = timed_steps(read_recording(gpu_recording(tmp_path / clock)), clock)

        assert all(sum(step.phases_ns.values()) == step.step_ns for step in steps)
        assert {step.clock for step in steps if step.sample.window == "clean"} == {clock}
        assert {step.clock for step in steps if step.sample.window == "free"} == {"host"}


def test_what_comes_before_the_forward_belongs_to_a_phase(tmp_path):
    """No DataLoader is seen: the stretch before the forward is data."""
    step = timed_steps(read_recording(gpu_recording(tmp_path / "run")), "device")[2]

    assert step.phases_ns == {"data": MS // 2, "forward": 3 * MS, "backward": 5 * MS, "optimizer": 3 * MS // 2}


def test_an_outlier_is_named_with_the_phase_that_grew(tmp_path):
    slow = sample(12, host_ns={"data": 9 * MS, "forward": 4 * MS, "backward": 5 * MS, "optimizer": MS})
    found = outliers(steps_of(tmp_path / "run", [*alike(12), slow]))

    assert [(one.step.sample.step, one.phase, one.phase_excess_ns) for one in found] == [(12, "data", 8 * MS)]
    assert found[0].excess_ns == 19 * MS - 10.1 * MS


def test_steps_that_compile_are_looked_at_and_not_compared_with(tmp_path):
    compiling = [sample(20 + i, host_ns={"forward": 100 * MS}, num_compiles=1) for i in range(12)]
    found = outliers(steps_of(tmp_path / "run", [*alike(10), *compiling]))

    assert {one.step.sample.step for one in found} == set(range(20, 32))
    assert found[0].excess_ns == 100 * MS - 10.05 * MS


def test_free_steps_are_compared_with_free_ones(tmp_path):
    """A machine that got slower is no eleven outliers; one of the free steps is."""
    free = [free_sample(20 + i) | {"wall_ns": 20 * MS} for i in range(11)]
    free[5]["wall_ns"] = 60 * MS
    free[0]["wall_ns"] = 500 * MS  # the windows' findings are written in it
    found = outliers(steps_of(tmp_path / "run", [*alike(10), *free]))

    assert [(one.step.sample.step, one.excess_ns, one.phase) for one in found] == [(25, 40 * MS, None)]


def test_few_steps_and_steps_alike_have_no_outliers(tmp_path):
    slow = sample(50, host_ns={"forward": 99 * MS})

    assert outliers(steps_of(tmp_path / "few", [*alike(3), slow])) == []
    same = [sample(i) for i in range(20)]
    hardly = sample(50, host_ns={"forward": int(10.4 * MS)})
    assert outliers(steps_of(tmp_path / "same", [*same, hardly])) == []
    spread = [sample(i, host_ns={"forward": (10 + i % 5) * MS}) for i in range(20)]
    assert outliers(steps_of(tmp_path / "spread", [*spread, sample(50, host_ns={"forward": 18 * MS})])) == []
    assert outliers(steps_of(tmp_path / "far", [*spread, sample(50, host_ns={"forward": 20 * MS})]))


@pytest.mark.parametrize("samples", [[5.0], [1.0, 1.0], [1.0, 2.0, 3.0, 10.0], [float(i % 7) for i in range(1000)]])
def test_every_sample_is_in_one_bin(samples):
    bins = histogram(samples)

    assert sum(one.num for one in bins) == len(samples)
    assert (bins[0].low, bins[-1].high) == (min(samples), pytest.approx(max(samples)))
    assert len(bins) <= 12 and histogram([]) == []
