"""Clocks of ranks from their steps: the true shift is always inside the stated bounds, whoever is late."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handmade import MS
from stepscope.analysis.ranks.step_clocks import JobClocks, RankSteps, job_clocks, rank_steps
from stepscope.trace.recording import StepSample

SECOND = 1000 * MS


@dataclass
class Rank:
    """A rank's clock (its reading at the true time 0, and its rate) and how long it takes for what."""

    zero_ns: int = 0
    ppm: float = 0.0
    late_ns: int = 0  # longer in its data than others, in every step
    leaves_ns: int = 0  # later than others, in every step: its place in the ring, a slow link
    samples: list[StepSample] = field(default_factory=list)

    def reads(self, true_ns: int) -> int:
        return round(self.zero_ns + true_ns * (1 + self.ppm / 1e6))


def train(ranks: list[Rank], num_steps: int, seed: int, noise_ns: int = MS, is_free: bool = False) -> int:
    """Give the ranks their steps; return the true time at which the lowest ends its last one.

    Each takes a random time for everything, enters its collective in the middle of the backward, and leaves any time
    after the last has entered. It may clip gradients, log and evaluate in its step.
    """
    chance = random.Random(seed)

    def some(most_ns: float) -> int:
        return round(chance.expovariate(1) * most_ns)

    now = [0] * len(ranks)
    for step in range(num_steps):
        marks = []
        for begin_ns, rank in zip(now, ranks):
            data = begin_ns + some(2 * noise_ns) + rank.late_ns
            forward = data + some(noise_ns)
            marks.append((begin_ns, data, forward, forward + some(noise_ns)))
        last_ns = max(enter for *_, enter in marks)
        for i, (rank, (begin, data, forward, _)) in enumerate(zip(ranks, marks)):
            backward = last_ns + some(noise_ns) + rank.leaves_ns
            clipped = backward + some(noise_ns)
            stepped = clipped + some(noise_ns)
            logged = stepped + some(5 * noise_ns) * (chance.random() < 0.2)
            at = [rank.reads(each) for each in (begin, data, forward, backward, clipped, stepped, logged)]
            names = ("data", "forward", "backward", "other", "optimizer", "logging")
            host_ns = {name: b - a for name, a, b in zip(names, at, at[1:])}
            if is_free:
                passes = sum(host_ns.pop(name) for name in ("forward", "backward", "other", "optimizer"))
                host_ns["unattributed"] = passes
            window = "free" if is_free else "clean"
            rank.samples.append(
                StepSample(step, window, at[0], at[-1] - at[0], host_ns, None, None, None, 1, 0, 0, None)
            )
            now[i] = logged
    return now[0]


def steps_of(ranks: list[Rank], most: int = 5000) -> list[RankSteps]:
    found = [rank_steps(number, rank.samples, most, rank.zero_ns) for number, rank in enumerate(ranks)]
    return [each for each in found if each is not None]


def clocks_of(ranks: list[Rank], most: int = 5000) -> JobClocks:
    found = job_clocks(steps_of(ranks, most))
    assert found is not None
    return found


def assert_true(found: JobClocks, ranks: list[Rank], true_ns: int) -> None:
    for row in found.clocks.iter_rows(named=True):
        shift_ns = ranks[row["rank"]].reads(true_ns) - ranks[0].reads(true_ns)
        assert row["earliest_ns"] <= shift_ns <= row["latest_ns"] and not row["is_contradicted"]
        assert abs(row["offset_ns"] - shift_ns) <= row["uncertainty_ns"]
        assert row["earliest_ns"] <= row["offset_ns"] <= row["latest_ns"]


one_rank = st.builds(
    Rank,
    zero_ns=st.integers(0, 10_000 * SECOND),
    ppm=st.floats(-49, 49),
    late_ns=st.sampled_from([0, 0, 0, 5 * MS, 60 * MS]),
    leaves_ns=st.sampled_from([0, 0, MS // 2, 10 * MS]),
)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(one_rank, min_size=2, max_size=5),
    num_steps=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    noise_ns=st.sampled_from([1000, MS, 20 * MS]),
    is_free=st.booleans(),
)
def test_the_true_shift_is_always_inside_the_stated_bounds(ranks, num_steps, seed, noise_ns, is_free):
    true_ns = train(ranks, num_steps, seed, noise_ns, is_free)

    assert_true(clocks_of(ranks), ranks, true_ns)


def test_a_drift_within_the_bounds_of_each_step_is_not_taken_for_a_constant_shift():
    ranks = [Rank(), Rank(ppm=90.0)]
    true_ns = train(ranks, 2000, seed=1, noise_ns=10 * MS)
    drift_ns = ranks[1].reads(true_ns) - ranks[0].reads(true_ns)

    found = clocks_of(ranks)
    assert drift_ns > 8 * MS and drift_ns > 2 * found.clocks["uncertainty_ns"][1] - drift_ns
    assert_true(found, ranks, true_ns)


def test_a_rank_that_is_always_late_is_named_though_causality_cannot_tell_it_from_its_clock():
    ranks = [Rank(), Rank(late_ns=60 * MS)]
    true_ns = train(ranks, 40, seed=2, noise_ns=MS // 10)

    found = clocks_of(ranks)
    assert_true(found, ranks, true_ns)
    row = found.clocks.row(1, named=True)
    assert 55 * MS < row["uncertainty_ns"] < 65 * MS and row["spread_ns"] < MS
    (late,) = found.late
    assert (late.rank, late.phase) == (1, "data") and late.last_share > 0.9


def test_a_clock_that_is_set_during_the_run_counts_from_then_on():
    ranks = [Rank(), Rank(zero_ns=5 * SECOND)]
    train(ranks, 30, seed=3)
    for sample in ranks[1].samples[:18]:
        object.__setattr__(sample, "start_ns", sample.start_ns - 2 * SECOND)

    row = clocks_of(ranks).clocks.row(1, named=True)
    assert row["is_contradicted"] and row["num_agreeing"] == 12
    assert row["earliest_ns"] <= 5 * SECOND <= row["latest_ns"] and abs(row["offset_ns"] - 5 * SECOND) < 50 * MS


def test_on_a_gpu_the_host_may_be_a_step_ahead():
    ranks = [Rank(), Rank()]
    train(ranks, 20, seed=4)
    before = clocks_of(ranks).clocks.row(1, named=True)
    for sample in ranks[0].samples:
        object.__setattr__(sample, "device_ns", {"forward": 1})

    step_ns = max(each.step_ns for each in steps_of(ranks))
    after = clocks_of(ranks).clocks.row(1, named=True)
    assert after["latest_ns"] - before["latest_ns"] == pytest.approx(step_ns, abs=1)
    assert before["earliest_ns"] - after["earliest_ns"] == pytest.approx(step_ns, abs=1)
