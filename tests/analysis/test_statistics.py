"""Quantiles, spread and the bootstrap interval, against the standard library and by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.time.statistics import describe, quantile

SAMPLES = st.lists(st.integers(1, 10**12), min_size=1, max_size=40)


def test_five_samples_by_hand():
    found = describe([50, 10, 30, 20, 40])

    assert (found.num_samples, found.median, found.p10, found.p90, found.mean) == (5, 30, 14, 46, 30)
    assert found.std == pytest.approx(math.sqrt(250))
    # In one resample of seventeen three or more of five draws are the smallest: 95 % reach from end to end.
    assert (found.ci_low, found.ci_high) == (10, 50)


def test_one_sample_is_its_own_distribution():
    found = describe([7])

    assert (found.median, found.p10, found.p90, found.mean, found.std) == (7, 7, 7, 7, 0)
    assert (found.ci_low, found.ci_high) == (7, 7)


def test_equal_samples_have_no_width():
    found = describe([3] * 20)

    assert (found.std, found.ci_low, found.ci_high) == (0, 3, 3)


def test_nothing_to_describe_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        describe([])


@pytest.mark.parametrize(("share", "value"), [(0, 10), (0.25, 15), (0.5, 20), (0.75, 30), (1, 40)])
def test_quantiles_are_interpolated(share, value):
    assert quantile([10, 20, 40], share) == value


@given(SAMPLES)
def test_median_and_mean_are_the_standard_librarys(samples):
    found = describe(samples)

    assert found.median == pytest.approx(statistics.median(samples), rel=1e-12)
    assert found.mean == pytest.approx(statistics.fmean(samples), rel=1e-12)
    if len(samples) > 1:
        assert found.std == pytest.approx(statistics.stdev(samples), rel=1e-6, abs=1e-3)


@given(SAMPLES)
def test_figures_are_in_order_and_inside_the_samples(samples):
    found = describe(samples)

    assert min(samples) <= found.p10 <= found.median <= found.p90 <= max(samples)
    assert min(samples) <= found.ci_low <= found.ci_high <= max(samples)


@given(SAMPLES)
def test_the_same_samples_in_any_order_give_the_same_figures(samples):
    shuffled = samples.copy()
    random.Random(1).shuffle(shuffled)

    assert describe(shuffled) == describe(samples)


def test_the_callers_samples_and_random_state_are_left_alone():
    samples = [3, 1, 2]
    random.seed(5)
    before = random.getstate()
    describe(samples)

    assert samples == [3, 1, 2] and random.getstate() == before


def test_the_interval_shrinks_with_more_samples():
    generator = random.Random(0)
    many = [generator.gauss(100, 10) for _ in range(400)]
    few, all_of_them = describe(many[:10]), describe(many)

    assert all_of_them.ci_high - all_of_them.ci_low < few.ci_high - few.ci_low
    assert all_of_them.ci_low < 100 + 2 and all_of_them.ci_high > 100 - 2
