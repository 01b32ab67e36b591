"""What lies between steps, per step: what is start-up, what is cold, how often it happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from handmade import MS, cpu_facts, sample, write_recording
from stepscope.analysis.time.loop_time import beside_ns, loop_time
from stepscope.analysis.time.summary import summary_of
from stepscope.trace.recording import Aside, read_recording


@pytest.fixture
def loop(tmp_path):
    """Return the time of 12 steps of 10 ms with evaluations of so many ms: before them, before a step, after them."""

    def measured(lead=0, tail=0, exit_after=None, kind="evaluation", **before):
        steps = [sample(step) for step in range(12)]
        for name, ms in before.items():
            step = steps[int(name.removeprefix("step"))]
            step["host_ns"] = {**step["host_ns"], kind: ms * MS}
            step["wall_ns"] += ms * MS
        facts = cpu_facts(command={"argv": ["train.py"], "exit_after": exit_after})
        recording = read_recording(write_recording(tmp_path / "run", facts, steps))
        return loop_time(replace(recording, lead=aside(kind, lead), tail=aside(kind, tail)), on_device=False)

    def aside(kind, ms):
        return Aside(0, ms * MS, {kind: ms * MS}, {kind: 1}) if ms else None

    return measured


def test_what_happens_only_before_the_first_step_is_start_up(loop):
    found = loop(lead=600)

    assert (found.step_ns, dict(found.between_ns), found.caveat) == (10 * MS, {}, None)
    assert {row.name: row.ns for row in found.rows}["evaluation"] == 600 * MS  # and the rows still have it
    assert "how often is unknown" in loop(lead=600, exit_after=12).caveat


def test_the_first_of_several_is_cold_and_the_later_ones_tell_their_length(loop):
    """300, 60 and 60 ms in 12 steps: three of 60."""
    assert loop(step3=300, step6=60, step9=60).between_ns == {"evaluation": 15 * MS}


def test_of_two_times_both_are_as_long_as_they_were(loop):
    """A long look after the first half, and a short one in the end, of a script that ran to its end."""
    assert loop(step6=300, tail=60).between_ns == {"evaluation": 30 * MS}


def test_a_run_that_was_stopped_tells_how_often_by_the_distance_from_first_to_last(loop):
    """Every fourth step: before step 2, 6 and 10, and the run ends in the middle of a period."""
    assert loop(step2=60, step6=60, step10=60, exit_after=12).between_ns == {"evaluation": 15 * MS}


def test_a_single_time_tells_how_often_by_the_steps_around_it(loop):
    """Once, before step 8 of 12: no earlier than every 8 steps. Before step 3: not again in the next 9."""
    assert loop(step8=120, exit_after=12).between_ns == {"evaluation": 15 * MS}
    assert loop(step3=90, exit_after=12).between_ns == {"evaluation": 10 * MS}
    assert loop(step8=120).between_ns == {"evaluation": 10 * MS}


def test_what_most_steps_have_is_a_part_of_them(loop):
    """The targets of an off-policy learner: a typical step has them, so they are not added to it."""
    found = loop(**{f"step{step}": 30 for step in range(1, 12)})

    assert (found.between_ns, round(found.step_ns)) == ({}, round((11 * 40 + 10) * MS / 12))
    assert found.in_step_ns["evaluation"] == 27.5 * MS
    assert beside_ns(found, 40 * MS) == (0, 0)
    assert {row.name: row.ns for row in found.rows}["evaluation"] == 330 * MS  # the rows have it as before


def test_on_a_gpu_its_own_clock_tells_how_long_that_takes(tmp_path):
    """The host is 20 ms ahead: it counts 30 ms as evaluation, in 20 of which the GPU still trains."""
    host = {"evaluation": 30 * MS, "forward": 10 * MS}
    device = {"evaluation": 10 * MS, "forward": 10 * MS, "backward": 20 * MS}
    steps = [{**sample(step, host_ns=host), "wall_ns": 40 * MS, "device_ns": device} for step in range(12)]
    found = loop_time(read_recording(write_recording(tmp_path / "run", cpu_facts(), steps)), on_device=True)

    assert (found.step_ns, found.between_ns) == (40 * MS, {})


def test_one_evaluation_after_the_last_step_belongs_to_the_run(loop):
    assert loop(tail=120).between_ns == {"evaluation": 10 * MS}
    assert loop(tail=120, exit_after=12).between_ns == {}


def test_what_comes_once_after_the_last_of_several_epochs_is_the_end_of_the_run(tmp_path):
    recording = read_recording(write_recording(tmp_path / "run", cpu_facts(), [sample(step) for step in range(12)]))
    steps = [
        replace(one, host_ns={**one.host_ns, "loader_start": MS}, wall_ns=one.wall_ns + MS)
        if not one.step % 6
        else one
        for one in recording.samples
    ]
    run = replace(
        recording, samples=tuple(steps), tail=Aside(0, 120 * MS, {"evaluation": 120 * MS}, {"evaluation": 1})
    )

    found = loop_time(run, on_device=False)
    assert "evaluation" not in found.between_ns
    assert {row.name: row.ns for row in found.rows}["evaluation"] == 120 * MS
    assert "evaluation" in loop_time(replace(run, samples=recording.samples), on_device=False).between_ns


def test_words_that_are_drawn_after_the_last_step_train_nothing(loop):
    assert loop(tail=120, kind="rollout").between_ns == {}
    assert loop(tail=120, step6=60, kind="rollout").between_ns == {"rollout": 5 * MS}


def test_a_loader_that_starts_after_the_last_step_feeds_none(loop):
    """The data of a test at the end, after one loader that was started before the first step."""
    assert loop(tail=120, step0=60, kind="loader_start").between_ns == {}
    assert loop(tail=120, step0=60, step6=60, kind="loader_start").between_ns == {"data": 10 * MS}


def test_what_a_compiling_step_collects_as_garbage_happens_once(tmp_path):
    """A little logging before step 0, 500 ms of garbage in the step that compiles, and nothing after it."""
    steps = [sample(step) for step in range(12)]
    for step, ms in ((0, 1), (2, 500)):
        steps[step]["host_ns"] = {**steps[step]["host_ns"], "garbage_collection": ms * MS}
        steps[step]["wall_ns"] += ms * MS
    steps[2]["num_compiles"] = 1
    facts = cpu_facts(command={"argv": ["train.py"], "exit_after": True})
    found = loop_time(read_recording(write_recording(tmp_path / "run", facts, steps)), on_device=False)

    assert (found.step_ns, dict(found.between_ns)) == (10 * MS, {})


def test_garbage_of_a_probe_is_measuring(tmp_path):
    steps = [sample(step, window) for step, window in enumerate(["clean"] * 8 + ["memory"] + ["free"] * 8)]
    steps[8]["host_ns"] = {**steps[8]["host_ns"], "garbage_collection": 240 * MS}
    steps[8]["wall_ns"] += 240 * MS
    facts = cpu_facts(command={"argv": ["train.py"], "exit_after": True})
    found = loop_time(read_recording(write_recording(tmp_path / "run", facts, steps)), on_device=False)

    assert (found.step_ns, dict(found.between_ns)) == (10 * MS, {})
    assert {row.name: row.ns for row in found.rows}["measuring"] == pytest.approx(240 * MS, rel=0.05)


@pytest.mark.parametrize(("on_device", "num"), [(True, 18), (False, 20)])
def test_a_host_that_gets_ahead_of_an_empty_gpu_is_not_its_pace(tmp_path, on_device, num):
    steps = [sample(step) for step in range(8)]
    steps += [
        sample(8 + place, "free", host_ns={"unattributed": ms * MS}) for place, ms in enumerate([4, 7] + [10] * 10)
    ]
    for step in steps:
        step["wall_ns"] = sum(step["host_ns"].values())
    found = loop_time(read_recording(write_recording(tmp_path / "run", cpu_facts(), steps)), on_device=on_device)

    assert found.num_measured == num
    assert (found.step_ns == 10 * MS) == on_device


@pytest.mark.parametrize(("wait_ms", "num"), [(0, 24), (3, 16)])
def test_what_workers_have_ready_counts_if_they_keep_up(tmp_path, wait_ms, num):
    steps = [
        sample(step, "free", host_ns={"forward": 10 * MS, "data": (wait_ms if step >= 8 else 0) * MS})
        for step in range(24)
    ]
    facts = cpu_facts(steps={"num_prefetched": 8})
    found = loop_time(read_recording(write_recording(tmp_path / "run", facts, steps)), on_device=False)

    assert (found.step_ns, found.num_measured) == ((10 + wait_ms) * MS, num)


def test_throughput_divides_work_and_time_of_the_same_steps(tmp_path):
    """Batches of 8 that grow to 32, with 1 ms per sample: 1,000 samples per second at any time."""
    sizes = [8] * 20 + [16] * 20 + [32] * 20
    steps = [
        sample(step, "free", num_samples=num, num_tokens=None, host_ns={"unattributed": num * MS})
        for step, num in enumerate(sizes)
    ]
    found = summary_of(read_recording(write_recording(tmp_path / "run", cpu_facts(), steps)))

    assert (found.throughput.unit, round(found.throughput.per_s)) == ("samples", 1000)
    assert (found.loop.num_measured, found.loop.caveat) == (60, None)


def test_what_lies_inside_a_clean_step_is_training_also_if_free_steps_are_not_split(tmp_path):
    """5 ms between backward and optimizer in each step of 10: free running sees one stretch of 10."""
    split = {"forward": 2 * MS, "backward": 2 * MS, "other": 5 * MS, "optimizer": MS}
    steps = [sample(step, host_ns=split) for step in range(20)]
    steps += [sample(step, "free", host_ns={"unattributed": 10 * MS}) for step in range(20, 80)]
    found = summary_of(read_recording(write_recording(tmp_path / "run", cpu_facts(), steps)))

    assert found.loop.goodput == 1.0


def test_steps_that_were_slower_before_are_told(tmp_path):
    def caveat(*times_ms):
        steps = [sample(step) for step in range(len(times_ms))]
        for step, ms in zip(steps, times_ms):
            step["host_ns"], step["wall_ns"] = {"forward": ms * MS}, ms * MS
        return loop_time(
            read_recording(write_recording(tmp_path / "run", cpu_facts(), steps)), on_device=False
        ).caveat

    told = "earlier steps took {} times as long on average: only the last {} steps are measured"
    assert caveat(*[39] * 48, *[30] * 48) == told.format("1.30", 48)
    assert caveat(*[90] * 12, *[30] * 84) == told.format("3.00", 84)
    assert caveat(*[39, 41] * 48) is None
    assert caveat(*[30] * 80, *[60] * 16) == "step times were still changing"  # the end alone is not the pace
    # Other processes slow down stretches of four steps: no part of the run is its pace.
    assert caveat(*([30] * 8 + [55] * 4) * 5, *[30] * 8) is None


def test_batches_that_were_made_during_slow_steps_are_not_a_higher_pace(tmp_path):
    """Workers make a batch in 10 ms. While steps take 12 ms, they fill the queue; the last 16 take no wait."""
    times_ms = [10] * 8 + [12] * 64 + [10] * 48 + [2] * 16
    steps = [sample(step, "free", host_ns={"forward": ms * MS}) for step, ms in enumerate(times_ms)]
    facts = cpu_facts(steps={"num_prefetched": 8})
    found = loop_time(read_recording(write_recording(tmp_path / "run", facts, steps)), on_device=False)

    assert (found.step_ns, found.num_measured) == (10 * MS, 136)
