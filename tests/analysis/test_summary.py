"""A whole recording summed up, in round numbers."""

from __future__ import annotations

import pytest

from handmade import MS, WINDOWS, cpu_facts, cpu_recording, gpu_recording, sample, steps_of, write_recording
from stepscope.analysis.time.summary import summarize
from stepscope.devices import Device
from stepscope.trace.recording import read_recording

H200 = Device("NVIDIA H200", {"bf16": 989_400_000_000_000}, 1 << 37, 10**12, "a data sheet")


def summary_of(folder, device=None):
    return summarize(read_recording(folder), device, None)


def written(folder, samples, counters=None, **facts):
    return summary_of(write_recording(folder, cpu_facts(**facts), samples, counters))


def test_a_cpu_recording(tmp_path):
    found = summary_of(cpu_recording(tmp_path / "run"))

    assert (found.num_steps, found.num_clean, found.num_compiling, found.clock) == (12, 4, 0, "host")
    assert (found.step_ns.median, found.step_ns.ci_low, found.step_ns.ci_high) == (10 * MS, 10 * MS, 10 * MS)
    assert found.warmup_ns == (10 * MS, 10 * MS)
    assert (found.throughput.unit, found.throughput.per_step, found.throughput.per_s) == ("tokens", 512, 51_200)
    assert {row.name: row.share for row in found.rows} == {
        "data": 0.1,
        "forward": 0.3,
        "backward": 0.5,
        "optimizer": 0.1,
        "other": 0.0,
    }
    assert [(e.window, e.ratio, e.num_steps) for e in found.observer_effects] == [
        ("trace", 2.0, 2),
        ("memory", 10.0, 1),
    ]
    assert (found.mfu, found.hfu, found.counters, found.num_kernels_per_step) == (None, None, None, None)
    assert found.flops.model_flops == 3_072_000 and found.data_is_named


def test_a_gpu_recording(tmp_path):
    found = summary_of(gpu_recording(tmp_path / "run"), H200)

    assert (found.clock, found.step_ns.median, found.host_step_ns.median) == ("device", 10 * MS, 10 * MS)
    assert found.mfu.share == pytest.approx(0.5)
    assert found.hfu.share == pytest.approx(0.55)
    assert found.num_kernels_per_step == 100
    assert {row.name: row.ns for row in found.rows} == {
        "data": 0,
        "forward": 2.5 * MS,
        "backward": 4.5 * MS,
        "optimizer": 1 * MS,
        "other": 0,
        "idle": 1.5 * MS,
        "unattributed": 0.5 * MS,
    }
    # 500 W for the 40 ms of the clean steps, and 4 × 512 tokens.
    assert found.throughput.joules_per_unit == pytest.approx(20 / 2048)
    assert found.counters.num_samples == 2 and found.counters.throttle_shares == (("sw_power_cap", 0.5),)


def test_a_step_that_compiled_is_left_out_unless_all_did(tmp_path):
    slow = {"host_ns": {"forward": 1000 * MS}, "num_compiles": 1}
    some = written(tmp_path / "some", [sample(0), sample(1, **slow), sample(2)])
    every = written(tmp_path / "every", [sample(0, **slow), sample(1, **slow)])

    assert (some.num_clean, some.num_compiling, some.step_ns.median) == (2, 1, 10 * MS)
    assert (every.num_clean, every.num_compiling, every.step_ns.median) == (2, 0, 1000 * MS)


def test_joules_a_token_leave_out_the_steps_that_are_left_out(tmp_path):
    """GIVEN a clean window with ten seconds of compiling in it THEN its energy is not the tokens'."""
    lines = [
        sample(0),
        sample(1, host_ns={"forward": 10_000 * MS}, num_compiles=1),
        sample(2, start_ns=10_010 * MS),
        sample(3, start_ns=10_020 * MS),
    ]
    moments = [5, 10_012, 10_015, 10_025]
    found = written(tmp_path / "run", lines, [{"t_ns": ms * MS, "power_watts": 500.0} for ms in moments])

    # 500 W for three steps of 10 ms.
    assert found.throughput.joules_per_unit == pytest.approx(500 * 0.030 / (3 * 512), rel=0.05)


def test_rows_are_the_middle_half_of_the_steps(tmp_path):
    outlier = {"data": 900 * MS, "forward": 10 * MS}
    samples = [sample(step, host_ns={"data": MS, "forward": 9 * MS}) for step in range(7)]
    found = written(tmp_path / "run", [*samples, sample(7, host_ns=outlier)])

    assert {row.name: row.share for row in found.rows}["data"] == pytest.approx(0.1)
    assert found.step_ns.mean > found.step_ns.median == 10 * MS


def test_samples_stand_in_where_there_are_no_tokens(tmp_path):
    found = written(tmp_path / "run", [sample(step, num_tokens=None) for step in range(4)])
    assert (found.throughput.unit, found.throughput.per_step, found.throughput.per_s) == ("samples", 8, 800)

    found = written(tmp_path / "none", [sample(0, num_tokens=None, num_samples=None)])
    assert found.throughput is None


def test_tokens_that_are_missing_from_one_step_are_not_made_up(tmp_path):
    found = written(tmp_path / "run", [sample(0), sample(1, num_tokens=None)])

    assert found.throughput.unit == "samples"


def test_steps_of_different_sizes_have_their_mean(tmp_path):
    found = written(tmp_path / "run", [sample(0, num_tokens=100), sample(1, num_tokens=300)])

    assert (found.throughput.per_step, found.throughput.per_s) == (200, 20_000)


def test_one_step_without_its_device_side_makes_it_the_hosts_clock(tmp_path):
    found = written(tmp_path / "run", [sample(0, device_ns={"forward": 5}), sample(1)])

    assert (found.clock, found.step_ns.median) == ("host", 10 * MS)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_run_that_ended_in_the_warm_up_has_no_figures(tmp_path, num_steps):
    found = written(tmp_path / "run", [sample(step, "warmup") for step in range(num_steps)])

    assert (found.num_steps, found.num_clean, found.step_ns, found.clock) == (num_steps, 0, None, None)
    assert found.rows == () and found.phases == () and found.observer_effects == ()
    assert (found.loop.caveat if found.loop else None) == ("only 1 step to go by" if num_steps else None)


def test_flops_need_the_window_they_were_counted_in(tmp_path):
    windows = [window for window in steps_of(WINDOWS) if window != "memory"]

    assert written(tmp_path / "run", [sample(i, w) for i, w in enumerate(windows)]).flops is None


def test_skipped_steps_are_counted_over_the_whole_run(tmp_path):
    found = written(tmp_path / "run", [sample(0, "warmup", num_skipped=2), sample(1), sample(2, num_skipped=1)])

    assert found.num_skipped == 3


def test_the_largest_number_of_micro_batches_is_said(tmp_path):
    assert written(tmp_path / "run", [sample(i, num_micro_batches=4) for i in range(3)]).num_micro_batches == 4
