"""Rows that sum to the step, whatever was recorded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.time.phases import PHASES, Phase, data_is_named, mean_phases, phase_of, rows
from stepscope.trace.recording import StepSample


def step(host_ns: dict[str, int], device_ns: dict[str, int] | None = None) -> StepSample:
    return StepSample(
        step=0,
        window="clean",
        start_ns=0,
        wall_ns=sum(host_ns.values()),
        host_ns=host_ns,
        device_ns=device_ns,
        num_tokens=None,
        num_samples=None,
        num_micro_batches=1,
        num_skipped=0,
        num_compiles=0,
        loss=None,
    )


def host(samples: list[StepSample]) -> dict[str, float]:
    return {phase.name: phase.host_ns for phase in mean_phases(samples, None)}


def test_the_mean_of_two_steps():
    assert host([step({"data": 2, "forward": 10}), step({"forward": 20, "other": 8})]) == {
        "data": 1,
        "forward": 15,
        "backward": 0,
        "optimizer": 0,
        "other": 4,
    }


def test_the_stretch_before_a_forward_is_data_when_no_loader_was_seen():
    bare = [step({"before_forward": 5, "forward": 10})]
    loader = [step({"before_forward": 5, "data": 1, "forward": 10})]

    assert (host(bare)["data"], host(bare)["other"], data_is_named(bare)) == (5, 0, False)
    assert (host(loader)["data"], host(loader)["other"], data_is_named(loader)) == (1, 5, True)


def test_the_stretch_before_a_backward_is_the_forward_when_none_was_seen():
    assert host([step({"before_backward": 5, "backward": 10})])["forward"] == 5
    assert host([step({"before_backward": 5, "forward": 1, "backward": 10})])["other"] == 5


def test_one_step_with_a_loader_decides_for_all():
    samples = [step({"before_forward": 4, "forward": 1}), step({"data": 2, "before_forward": 4, "forward": 1})]

    assert phase_of(samples)["before_forward"] == "other"
    assert (host(samples)["data"], host(samples)["other"]) == (1, 4)


def test_a_name_nobody_knows_is_other():
    assert host([step({"evaluation": 3})])["other"] == 3


def test_rows_on_a_cpu_are_the_host_time():
    found = rows(mean_phases([step({"data": 1, "forward": 3, "backward": 5, "optimizer": 1})], None))

    assert [(row.name, row.ns, row.share) for row in found] == [
        ("data", 1, 0.1),
        ("forward", 3, 0.3),
        ("backward", 5, 0.5),
        ("optimizer", 1, 0.1),
        ("other", 0, 0.0),
    ]


def test_rows_on_a_gpu_are_busy_time_idle_and_unattributed():
    samples = [step({"forward": 1}, {"forward": 40, "backward": 50, "optimizer": 10})]
    found = rows(mean_phases(samples, {"forward": 30, "backward": 50, "optimizer": 2}), unattributed_busy_ns=3)

    assert {row.name: row.ns for row in found} == {
        "data": 0,
        "forward": 30,
        "backward": 50,
        "optimizer": 2,
        "other": 0,
        "idle": 15,
        "unattributed": 3,
    }


def test_a_phase_is_never_busier_than_it_is_long():
    samples = [step({"forward": 1}, {"forward": 10, "backward": 20})]
    found = {row.name: row.ns for row in rows(mean_phases(samples, {"forward": 15, "backward": 5}), 100)}

    assert (found["forward"], found["backward"], found["unattributed"], found["idle"]) == (10, 5, 15, 0)


def test_without_a_trace_device_rows_have_no_idle():
    found = rows(mean_phases([step({"forward": 1}, {"forward": 10})], None))

    assert [row.name for row in found] == list(PHASES) and sum(row.ns for row in found) == 10


def test_one_step_without_its_device_side_makes_it_host_time():
    samples = [step({"forward": 4}, {"forward": 10}), step({"forward": 6})]

    assert {row.name: row.ns for row in rows(mean_phases(samples, {"forward": 3}))}["forward"] == 5


def test_a_step_of_no_time_has_shares_of_zero():
    assert {row.share for row in rows(mean_phases([step({"forward": 0})], None))} == {0.0}


LABELS = st.sampled_from([*PHASES, "before_forward", "before_backward", "something new"])
TIMES = st.dictionaries(LABELS, st.integers(0, 10**12), min_size=1)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=8), TIMES | st.none(), st.integers(0, 10**12))
def test_the_rows_sum_to_the_mean_step_on_either_clock(steps, busy, unattributed):
    on_cpu = [step(host_ns) for host_ns, _ in steps]
    on_gpu = [step(host_ns, device_ns) for host_ns, device_ns in steps]
    for samples, total in (
        (on_cpu, sum(sum(s.host_ns.values()) for s in on_cpu)),
        (on_gpu, sum(sum(s.device_ns.values()) for s in on_gpu)),
    ):
        found = rows(mean_phases(samples, busy), unattributed)

        assert sum(row.ns for row in found) == pytest.approx(total / len(samples), rel=1e-12, abs=1e-6)
        assert all(row.ns >= -1e-6 for row in found)
        if total:
            assert sum(row.share for row in found) == pytest.approx(1, abs=1e-9)


def test_arguments_are_not_changed():
    phases = [Phase("forward", 1.0, 2.0, 1.0)]
    busy = {"forward": 1.0}
    rows(phases, 0.5)
    mean_phases([step({"forward": 1}, {"forward": 2})], busy)

    assert phases == [Phase("forward", 1.0, 2.0, 1.0)] and busy == {"forward": 1.0}
