"""Steps that come back slow."""

from __future__ import annotations

import random

import pytest
from recorded_cases import TRAINING, recorded, run_script

from stepscope.errors import Unavailable
from stepscope.findings.rules.step_times import noisy_steps


def every(period, num_steps, slow_ms=60.0):
    return [slow_ms if step % period == 0 else 10.0 for step in range(num_steps)]


def test_a_step_that_comes_back_every_five(tmp_path):
    (finding,) = noisy_steps(recorded(tmp_path, every(5, 40), where="other"))

    assert finding.saving_ns == 50e6 * 8 / 40
    assert finding.sentence.startswith("Every 5 steps, one takes up to 60.0 ms (median: 10.0 ms)")
    assert "outside of forward, backward and optimizer" in finding.sentence
    assert finding.confidence == "high"


def test_on_a_gpu_the_device_clock_counts(tmp_path):
    (finding,) = noisy_steps(recorded(tmp_path, every(5, 40), where="data", is_gpu=True))

    assert finding.saving_ns == 10e6
    assert "waiting for data" in finding.sentence


def test_an_optimizer_that_steps_every_few_micro_batches_is_the_training_itself(tmp_path):
    assert noisy_steps(recorded(tmp_path, every(4, 40), where="optimizer")) == []


def test_steps_that_are_alike(tmp_path):
    assert noisy_steps(recorded(tmp_path, [10.0] * 40)) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_has_no_period(tmp_path, seed):
    dice = random.Random(seed)
    noise = [10.0 if dice.random() < 0.85 else 60.0 for _ in range(40)]

    assert noisy_steps(recorded(tmp_path, noise, where="other")) == []


def test_two_slow_steps_of_twenty_may_be_chance(tmp_path):
    assert noisy_steps(recorded(tmp_path, every(10, 20), where="other")) == []


def test_without_clean_steps(tmp_path):
    with pytest.raises(Unavailable):
        noisy_steps(recorded(tmp_path, []))


@pytest.mark.long
def test_a_script_that_sleeps_every_tenth_step(forks, tmp_path):
    also = "time.sleep(0.5 if step % 10 == 9 else 0.1)"  # as long as a busy machine seldom makes one step wait
    script = TRAINING.format(num_steps=70, backward="", also=also)

    (finding,) = noisy_steps(run_script(forks, tmp_path, script, "--trace", "0"))

    assert finding.sentence.startswith("Every 10 steps, one takes")
    # 400 ms in one of ten steps, whatever else the machine does; six of the 63 steps that are looked at.
    assert finding.saving_ns > 0.8 * 400e6 / 11
