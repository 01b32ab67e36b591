"""Where growth begins, how sure that is, and what counts as evidence for it."""

import random

import pytest

from history_maker import Run, write_history
from stepscope.analysis.run.change_points import DRIFT, STEP, changes
from stepscope.analysis.run.segmented import DECISIVE, advantage, growth, levels
from stepscope.findings.over_time import findings_over_time
from stepscope.session.history import load
from stepscope.session.run import run_of


def grown(seed: int, at: int, noise: float, num: int = 100, slope: float = 0.005, alike: float = 0.0) -> list[float]:
    """A level of 1 that grows from value `at` on; neighbors have `alike` of their noise in common."""
    numbers = random.Random(seed)
    found, common = [], 0.0
    for i in range(num):
        common = alike * common + numbers.gauss(0, noise)
        found.append(1.0 + common + slope * max(0, i - at))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("alike", "least"), [(0.0, 36), (0.7, 32)])
def test_growth_begins_within_its_interval_in_nine_of_ten_series(alike, least):
    """If neighbors are much alike, in eight: how much they are is not known exactly."""
    inside = 0
    for seed in range(40):
        at = random.Random(seed).randint(10, 70)
        fit, _ = growth(grown(seed, at, 0.01, alike=alike), 75)
        inside += fit.low <= at <= fit.high
    assert inside >= least


def test_an_interval_is_as_long_as_the_noise_makes_it():
    lengths = []
    for noise in (0.002, 0.01, 0.04):
        fit, _ = growth(grown(1, 40, noise), 75)
        lengths.append(fit.high - fit.low)
    assert lengths[0] <= 8 and lengths == sorted(lengths) and lengths[2] > 3 * lengths[0]


def test_noise_that_wanders_is_little_evidence():
    """The same slope is decisive if values are independent, and not if neighbors are alike."""
    found = []
    for alike in (0.0, 0.95):
        points = grown(5, 0, 0.02, slope=0.0008, alike=alike)
        fit, num = growth(points, 75)
        found.append(advantage((fit.cost, 3), next(levels(points, 10)), num, 1e-9))
    assert found[0] > DECISIVE > found[1]


def test_one_step_is_not_called_growth_and_growth_is_not_called_steps():
    numbers = random.Random(3)
    steps = [1.0 + numbers.gauss(0, 0.01) + (0.2 if i >= 60 else 0.0) for i in range(150)]
    assert [(each.kind, each.index) for each in changes(steps, is_one_sided=False)] == [(STEP, 60)]
    slow = [1.0 + numbers.gauss(0, 0.01) + 0.2 * max(0, i - 60) / 90 for i in range(150)]
    (found,) = changes(slow, is_one_sided=False)
    assert found.kind == DRIFT and found.low <= 60 <= found.high and found.index == pytest.approx(60, abs=8)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.long)])
def test_the_interval_of_a_step_holds_it(seeds):
    for seed in seeds:
        numbers = random.Random(seed)
        at = numbers.randint(30, 120)
        values = [1.0 + numbers.gauss(0, 0.06) + (0.2 if i >= at else 0.0) for i in range(150)]
        for each in changes(values, is_one_sided=False):
            assert each.low <= each.index <= each.high and each.low - 3 <= at <= each.high + 3


def test_a_finding_says_where_it_may_begin_if_that_is_unsure(tmp_path):
    sentences = []
    for noise in (0.002, 0.06):
        slower = Run(num_steps=2_000, noise=noise, slower=lambda step: 1 + max(0, step - 800) / 100 * 0.02)
        (finding,) = findings_over_time(run_of(None, load(write_history(tmp_path / str(noise), slower))))
        row = finding.evidence[0].rows[0]
        assert row["earliest_step"] <= 800 <= row["latest_step"]
        sentences.append(finding.sentence)
    assert "or some step from" not in sentences[0] and "or some step from" in sentences[1]
