"""Where a noisy series changes, and that noise alone is not taken for a change."""

import random
from statistics import median

import pytest

from noisy_machine import noisy_factors
from stepscope.analysis.run.change_points import DRIFT, STEP, changes

NUM, GROUP = 2_000, 4


def medians(values: list[float]) -> list[float]:
    return [median(values[i : i + GROUP]) for i in range(0, len(values), GROUP)]


@pytest.mark.parametrize("seeds", [range(100, 103), pytest.param(range(103, 120), marks=pytest.mark.long)])
def test_noise_alone_does_not_change_in_20_runs(seeds):
    found = [changes(medians(noisy_factors(seed, NUM))) for seed in seeds]
    assert found == [()] * len(seeds)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 5))])
def test_a_level_that_rises_is_found_where_it_does(seed):
    at = random.Random(seed).randint(300, 1700)
    slower = [each + (0.3 if step >= at else 0.0) for step, each in enumerate(noisy_factors(seed, NUM))]
    (found,) = changes(medians(slower))
    assert found.kind == STEP and found.end == NUM // GROUP
    assert found.index * GROUP == pytest.approx(at, abs=0.05 * NUM)
    assert found.share == pytest.approx(0.3, abs=0.08)


@pytest.mark.parametrize("at", [0, 600, 900])
def test_a_slow_growth_is_one_drift_and_not_many_steps(at):
    quiet = random.Random(at)
    values = [1.0 + abs(quiet.gauss(0, 0.02)) + max(0, step - at) / 100 * 0.01 for step in range(NUM)]
    (found,) = changes(medians(values))
    assert found.kind == DRIFT
    assert found.index * GROUP == pytest.approx(at, abs=0.05 * NUM)
    assert found.share == pytest.approx((NUM - at) / 100 * 0.01, rel=0.15)


def test_a_slow_stretch_has_a_begin_and_an_end():
    values = [each + (0.5 if 800 <= step < 1300 else 0.0) for step, each in enumerate(noisy_factors(7, NUM))]
    slower, faster = changes(medians(values))
    assert slower.index * GROUP == pytest.approx(800, abs=0.05 * NUM)
    assert faster.index * GROUP == pytest.approx(1300, abs=0.05 * NUM)
    assert slower.end == faster.index and slower.share > 0 > faster.share


def test_of_many_values_neighbors_are_joined():
    values = [each + (0.4 if step >= 40_000 else 0.0) for step, each in enumerate(noisy_factors(3, 60_000))]
    (found,) = changes(values)
    assert found.index == pytest.approx(40_000, abs=600)


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 23, [0.0] * 100, [5.0] * 100])
def test_short_and_constant_series_have_no_changes(values):
    assert changes(values) == ()
