"""The rank test against enumeration and known values, the bootstrap against a plain one, and how often both err."""

from __future__ import annotations

import json
import math
import random
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from parametrized import parametrized
from stepscope.analysis.comparison.metrics import METRICS, Measure, change_of
from stepscope.analysis.comparison.significance import (
    MIN_SAMPLES,
    difference,
    difference_of_runs,
    mann_whitney,
    student,
)
from stepscope.analysis.time.statistics import quantile

REAL_US = json.loads((Path(__file__).parent / "data" / "step_times.json").read_text())["step_us"]
NUM_TRIALS = 1000
values = st.floats(1, 1000, allow_nan=False)


def change(base, new):
    measures = [Measure(quantile(sorted(side), 0.5), tuple(side)) for side in (base, new)]
    return change_of(METRICS["step_time"], *measures, threshold_share=0.02)


def verdict(base, new):
    return change(base, new).verdict


def enumerated(base, new):
    """The exact two-sided p-value by looking at every way to share the samples out."""

    def above(first, second):
        return sum(one > other for one in first for other in second)

    both = [*base, *new]
    middle = len(base) * len(new) / 2
    seen = abs(above(base, new) - middle)
    splits = list(combinations(range(len(both)), len(base)))
    extreme = 0
    for chosen in splits:
        first = [both[i] for i in chosen]
        second = [both[i] for i in range(len(both)) if i not in chosen]
        extreme += abs(above(first, second) - middle) >= seen
    return extreme / len(splits)


def by_ranks(base, new):
    """The normal approximation the other way round: from sums of mid-ranks, as textbooks have it."""
    both = sorted([*base, *new])
    ranks = {value: both.index(value) + (both.count(value) + 1) / 2 for value in both}
    n, m = len(base), len(new)
    u = sum(ranks[value] for value in base) - n * (n + 1) / 2
    ties = sum(both.count(value) ** 3 - both.count(value) for value in set(both))
    sigma = math.sqrt(n * m / 12 * (n + m + 1 - ties / ((n + m) * (n + m - 1))))
    z = max(0.0, abs(u - n * m / 2) - 0.5) / sigma
    return math.erfc(z / math.sqrt(2))


def test_known_p_values():
    # Hollander and Wolfe's age at diagnosis, as in SciPy's documentation: U = 17, p = 0.1111.
    assert mann_whitney([19, 22, 16, 29, 24], [20, 11, 17, 12]) == pytest.approx(1 / 9)
    assert mann_whitney([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1)
    assert mann_whitney([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert mann_whitney([5, 5, 5], [5, 5]) == 1.0
    with pytest.raises(ValueError, match="both sides"):
        mann_whitney([], [1.0])


@given(st.lists(values, min_size=2, max_size=9, unique=True), st.integers(1, 8))
def test_few_samples_without_ties_are_exact(samples, cut):
    assume(cut < len(samples))
    base, new = samples[:cut], samples[cut:]

    assert mann_whitney(base, new) == pytest.approx(enumerated(base, new))
    assert mann_whitney(base, new) == mann_whitney(new, base)


@given(st.lists(st.integers(1, 6), min_size=3, max_size=40), st.lists(st.integers(1, 6), min_size=3, max_size=40))
def test_ties_and_many_samples_take_the_normal_approximation(base, new):
    ties = len({*base, *new}) < len(base) + len(new)
    assume(ties and len({*base, *new}) > 1)

    assert mann_whitney(base, new) == pytest.approx(by_ranks(base, new))


def test_exact_and_normal_meet():
    generator = random.Random(3)
    base, new = ([generator.gauss(place, 1) for _ in range(20)] for place in (0, 0.7))

    assert mann_whitney(base, new) == pytest.approx(by_ranks(base, new), rel=0.1)


def test_three_and_three_are_never_enough():
    far_apart = ([1.0, 1.1, 1.2], [100.0, 110.0, 120.0])

    assert mann_whitney(*far_apart) >= 0.05
    assert verdict(*far_apart) == "too few samples"
    assert verdict([1.0] * (MIN_SAMPLES - 1), [2.0] * 50) == "too few samples"
    assert verdict([1, 1.01, 1.02, 1.03, 1.04, 1.05], [2, 2.1, 2.2, 2.3, 2.4, 2.5]) == "slower"


@parametrized("num", [6, 7, 20, 31], quick=2)
def test_the_interval_is_that_of_a_plain_bootstrap(num):
    generator = random.Random(num)
    base, new = ([generator.lognormvariate(place, 0.2) for _ in range(num)] for place in (0, 0.1))
    ratios = sorted(
        quantile(sorted(generator.choices(new, k=num)), 0.5) / quantile(sorted(generator.choices(base, k=num)), 0.5)
        for _ in range(5000)
    )

    found = difference(base, new)

    assert found.low == pytest.approx(quantile(ratios, 0.025), rel=0.03)
    assert found.high == pytest.approx(quantile(ratios, 0.975), rel=0.03)
    assert found.low < found.ratio < found.high
    assert found == difference(new=list(reversed(new)), base=base), "the order and the time of day do not matter"


def test_samples_that_are_all_alike_have_no_interval_to_speak_of():
    assert difference([7] * 10, [7] * 12) == difference([7.0] * 10, [7.0] * 12)
    same = difference([7] * 10, [7] * 12)
    assert (same.ratio, same.low, same.high, same.p_value, same.detectable_share) == (1, 1, 1, 1, 0)
    assert difference([7] * 10, [8] * 10).is_significant


@pytest.mark.long
def test_false_alarms_in_real_noise_are_rare():
    generator = random.Random(1)
    called = significant = 0
    for _ in range(NUM_TRIALS):
        drawn = generator.sample(REAL_US, 60)
        found = change(drawn[:30], drawn[30:])
        called += found.verdict != "no difference shown"
        significant += found.is_significant

    assert called <= significant <= 0.05 * NUM_TRIALS
    assert significant > 0, "a test that never says anything is no test"


@pytest.mark.long
def test_a_slowdown_of_five_percent_is_caught():
    generator = random.Random(2)
    verdicts = [
        verdict([generator.gauss(1, 0.03) for _ in range(30)], [1.05 * generator.gauss(1, 0.03) for _ in range(30)])
        for _ in range(NUM_TRIALS)
    ]

    assert verdicts.count("slower") >= 0.9 * NUM_TRIALS
    assert verdicts.count("faster") == 0


@pytest.mark.parametrize(
    ("freedom", "t", "p_value"),
    [(1, 12.706, 0.05), (2, 4.303, 0.05), (4, 2.776, 0.05), (5, 4.032, 0.01), (10, 2.228, 0.05), (30, 2.750, 0.01)],
)
def test_students_t_is_that_of_the_tables(freedom, t, p_value):
    assert student(t, freedom) == student(-t, freedom) == pytest.approx(p_value, rel=2e-3)
    assert student(0.0, freedom) == 1


def test_runs_that_are_all_alike():
    same, other = difference_of_runs([7, 7, 7], [7, 7, 7]), difference_of_runs([7, 7, 7], [8, 8, 8])

    assert (same.ratio, same.low, same.high, same.p_value) == (1, 1, 1, 1)
    assert other.is_significant and other.ratio == pytest.approx(8 / 7)


def test_the_interval_of_runs_is_wider_the_further_they_are_apart():
    near = difference_of_runs([10, 10.1, 9.9], [11, 11.1, 10.9])
    far = difference_of_runs([10, 12, 8], [11, 13, 9])

    # By hand: logarithms' difference ± 2.776 · √(s² · 2 ÷ 3).
    assert (near.low, near.high) == (pytest.approx(1.0760, abs=1e-3), pytest.approx(1.1245, abs=1e-3))
    assert near.is_significant and not far.is_significant and far.low < 1 < far.high


@pytest.mark.long
@pytest.mark.parametrize("num_runs", [3, 4, 5])
def test_runs_on_a_machine_that_is_not_at_rest_are_seldom_called_different(num_runs):
    """Runs of 30 neighboring steps from anywhere in a real, restless hour: by steps alone, half would differ."""
    generator = random.Random(5)
    by_runs = by_steps = 0
    for _ in range(NUM_TRIALS):
        sides = []
        for _ in range(2):
            starts = [generator.randrange(len(REAL_US) - 30) for _ in range(num_runs)]
            sides.append([REAL_US[start : start + 30] for start in starts])
        medians = [[quantile(sorted(run), 0.5) for run in side] for side in sides]
        by_runs += difference_of_runs(*medians).is_significant
        by_steps += difference(*([us for run in side for us in run] for side in sides)).is_significant

    assert 0 < by_runs <= 0.05 * NUM_TRIALS
    assert by_steps > 0.3 * NUM_TRIALS


def test_three_runs_of_each_side_show_five_percent_where_runs_are_one_percent_apart():
    generator = random.Random(6)
    shown = 0
    for _ in range(NUM_TRIALS):
        base, new = ([place * generator.lognormvariate(0, 0.01) for _ in range(3)] for place in (1, 1.05))
        shown += difference_of_runs(base, new).is_significant

    assert shown >= 0.9 * NUM_TRIALS


@pytest.mark.long
def test_what_is_said_to_be_shown_four_times_out_of_five_is():
    generator = random.Random(4)

    def normal(factor=1.0):
        return [factor * generator.gauss(1, 0.03) for _ in range(20)]

    shares = [difference(normal(), normal()).detectable_share for _ in range(100)]
    share = sum(shares) / len(shares)
    shown = sum(difference(normal(), normal(1 + share)).is_significant for _ in range(300)) / 300

    assert 0.7 < shown < 0.92
