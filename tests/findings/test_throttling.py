"""Clocks that are held back."""

from __future__ import annotations

import pytest
from recorded_cases import recorded

from handmade import MS
from stepscope.errors import Unavailable
from stepscope.findings.rules.machine import throttling


def held_back(folder, mhz, *reasons, first_mhz=1980, **limits):
    """20 steps of 10 ms and a sample with each; the first has no reason, and a clock of its own."""
    nvml = [
        {"t_ns": i * 10 * MS + MS, "sm_clock_mhz": mhz if i else first_mhz, "power_watts": 500.0,
         "throttle": list(reasons) if i else []}
        for i in range(20)
    ]  # fmt: skip
    return throttling(recorded(folder, [10.0] * 20, nvml, is_gpu=True, counters={"other_processes": [], **limits}))


def test_heat(tmp_path):
    (finding,) = held_back(tmp_path, 1485, "hw_thermal_slowdown", first_mhz=1485, max_sm_clock_mhz=1980.0)

    assert finding.saving_ns == pytest.approx(10e6 * 0.25)
    assert finding.upper_bound
    assert "1,485 MHz at 500 W in the clean steps, 25 % below the device's 1,980 MHz" in finding.sentence
    assert "limited by heat in 95 % of 20 samples" in finding.sentence


def test_without_the_device_s_highest_clock_the_highest_that_was_seen_counts(tmp_path):
    (finding,) = held_back(tmp_path, 1485, "sw_thermal_slowdown")

    assert finding.saving_ns == pytest.approx(10e6 * 0.25 * 19 / 20)
    assert "below the highest observed, 1,980 MHz" in finding.sentence


def test_heat_is_named_before_the_power_limit(tmp_path):
    (finding,) = held_back(tmp_path, 1485, "sw_power_cap", "sw_thermal_slowdown")

    assert "limited by heat" in finding.sentence


def test_a_power_limit_that_was_lowered(tmp_path):
    limits = {"max_sm_clock_mhz": 1980.0, "power_limit_watts": 400.0, "default_power_limit_watts": 700.0}

    (finding,) = held_back(tmp_path, 1881, "sw_power_cap", **limits)

    assert finding.fix == "sudo nvidia-smi -pl 700"
    assert finding.saving_ns == pytest.approx(10e6 * 0.05 * 19 / 20)


@pytest.mark.parametrize(
    ("mhz", "reasons", "limits"),
    [
        pytest.param(1980, ["sw_power_cap"], {}, id="at the highest clock"),
        pytest.param(1900, ["sw_power_cap"], {}, id="a little for the power limit, as at any full load"),
        pytest.param(1500, ["sw_power_cap"], {"power_limit_watts": 700.0, "default_power_limit_watts": 700.0},
                     id="the device's own power limit"),
        pytest.param(1500, ["gpu_idle"], {}, id="nothing to do"),
        pytest.param(1500, [], {}, id="no reason given"),
    ],
)  # fmt: skip
def test_clocks_that_nothing_holds_back(tmp_path, mhz, reasons, limits):
    assert held_back(tmp_path, mhz, *reasons, **limits) == []


def test_without_counters(tmp_path):
    with pytest.raises(Unavailable, match="NVML"):
        throttling(recorded(tmp_path, [10.0] * 20))
