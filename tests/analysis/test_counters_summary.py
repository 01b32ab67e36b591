"""NVML's samples over the clean steps."""

from __future__ import annotations

import pytest

from stepscope.analysis.time.summary import summarize_counters
from stepscope.trace.recording import CounterSample

SECOND = 10**9


def test_only_samples_inside_the_window_count():
    samples = [CounterSample(t, power_watts=float(t)) for t in (0, 10, 20, 30, 40)]
    found = summarize_counters(samples, [(10, 30)])

    assert (found.num_samples, found.power_watts.mean, found.power_watts.p95) == (3, 20.0, 29.0)


def test_no_sample_inside_is_nothing():
    assert summarize_counters([CounterSample(5)], [(10, 20)]) is None
    assert summarize_counters([], [(10, 20)]) is None


def test_a_counter_the_device_does_not_offer_is_none():
    found = summarize_counters([CounterSample(1, gpu_busy_share=0.5)], [(0, 2)])

    assert found.gpu_busy_share.mean == 0.5
    assert found.power_watts is found.sm_clock_mhz is found.memory_clock_mhz is found.joules is None


def test_a_counter_that_is_there_now_and_then_is_the_mean_of_what_there_is():
    samples = [CounterSample(1, sm_clock_mhz=1000), CounterSample(2), CounterSample(3, sm_clock_mhz=2000)]

    assert summarize_counters(samples, [(0, 4)]).sm_clock_mhz.mean == 1500


def test_reasons_for_throttling_are_shares_of_the_samples_and_idleness_is_none():
    throttles = [("gpu_idle",), ("sw_power_cap", "gpu_idle"), ("sw_power_cap",), ("hw_thermal",)]
    samples = [CounterSample(t, throttle=reasons) for t, reasons in enumerate(throttles)]

    assert summarize_counters(samples, [(0, 3)]).throttle_shares == (("hw_thermal", 0.25), ("sw_power_cap", 0.5))


def test_energy_comes_from_the_meter_scaled_to_the_window():
    samples = [
        CounterSample(1 * SECOND, power_watts=999.0, energy_joules=1000.0),
        CounterSample(2 * SECOND, power_watts=999.0),
        CounterSample(3 * SECOND, power_watts=999.0, energy_joules=1200.0),
    ]

    assert summarize_counters(samples, [(0, 4 * SECOND)]).joules == pytest.approx(400)  # 100 W for 4 s


def test_energy_is_power_by_time_where_there_is_no_meter():
    samples = [CounterSample(SECOND, power_watts=100.0), CounterSample(2 * SECOND, power_watts=300.0)]

    assert summarize_counters(samples, [(0, 4 * SECOND)]).joules == pytest.approx(800)


def test_one_reading_of_the_meter_is_not_enough():
    samples = [CounterSample(SECOND, power_watts=100.0, energy_joules=5.0)]

    assert summarize_counters(samples, [(0, 4 * SECOND)]).joules == pytest.approx(400)


def test_two_readings_at_the_same_moment_are_no_division_by_zero():
    samples = [CounterSample(SECOND, 0.5, power_watts=100.0, energy_joules=e) for e in (5.0, 6.0)]

    assert summarize_counters(samples, [(0, 4 * SECOND)]).joules == pytest.approx(400)


def test_what_ran_between_the_steps_does_not_count():
    samples = [CounterSample(t * SECOND, power_watts=w) for t, w in ((1, 100.0), (5, 900.0), (9, 100.0))]
    found = summarize_counters(samples, [(0, 2 * SECOND), (8 * SECOND, 10 * SECOND)])

    assert (found.num_samples, found.power_watts.mean) == (2, 100.0)
    assert found.joules == pytest.approx(400)  # 100 W for the 4 s of the steps
