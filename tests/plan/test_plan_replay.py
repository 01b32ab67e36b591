"""Births and deaths of some steps, played on: what settles, what grows, and what is there at the peak."""

from __future__ import annotations

import pytest

from stepscope.planner.allocator import MAX_REPEATS, MIB, Events, live_at_peak, replay, rounded


def events_of(steps, build=(), period=1):
    """Events from words: `+a=3` is born with 3 bytes, `-a` dies; a name is one allocation."""
    allocations, index_of, begins, at = [], {}, [], 0
    for number, words in enumerate((build, *steps)):
        if number:
            begins.append(at)
        for word in words:
            name, _, size = word[1:].partition("=")
            if word[0] == "+":
                index_of[name] = len(allocations)
                allocations.append({"bytes": int(size), "born": at, "died": None})
            else:
                allocations[index_of[name]]["died"] = at
            at += 1
    return Events(allocations, [*begins, at], period)


def test_gradients_of_a_step_take_the_place_of_the_last_ones():
    big = 30 * MIB
    events = events_of(
        [
            [f"+activation1={big}", f"+gradient1={MIB}", "-activation1"],
            ["-gradient1", f"+activation2={big}", f"+gradient2={MIB}", "-activation2"],
        ],
        build=[f"+weight={MIB}"],
    )

    found = replay(events)

    assert events.growth_bytes() == 0 and found.settles_at_step == 1
    assert found.peak_allocated_bytes == 32 * MIB
    assert sum(size for _, size in live_at_peak(events, found)) == 32 * MIB


@pytest.mark.parametrize("rounds", [True, False])
def test_what_every_step_leaves_behind_grows_and_never_settles(rounds):
    kept = 5 * MIB
    events = events_of([[f"+kept1={kept}", "+loss1=4"], [f"+kept2={kept}", "+loss2=4"]], build=[f"+weight={MIB}"])

    found = replay(events, rounds=rounds)

    assert found.settles_at_step is None
    assert events.growth_bytes(rounded if rounds else int) == kept + (512 if rounds else 4)
    number = found.peak_at[0]
    assert 2 < number <= 2 + MAX_REPEATS + 1
    live = live_at_peak(events, found, rounds)
    assert sum(size for _, size in live) == found.peak_allocated_bytes
    assert len(live) == 1 + 2 * number


def test_one_that_is_replaced_by_two_halves_does_not_grow():
    events = events_of(
        [[f"+whole={8 * MIB}"], ["-whole", f"+left={4 * MIB}", f"+right={4 * MIB}"]], build=[f"+weight={MIB}"]
    )

    found = replay(events)

    assert events.growth_bytes() == 0 and found.settles_at_step is not None
    assert found.peak_allocated_bytes <= 13 * MIB


def test_one_that_is_replaced_by_a_longer_one_grows():
    events = events_of([["+cache1=100"], ["+cache2=200", "-cache1"]])

    assert events.growth_bytes() == 100
    assert replay(events).settles_at_step is None


def test_a_step_that_is_not_like_the_last_has_its_say_in_the_peak():
    steps = [["+a=100", "-a"], ["+b=900", "-b"], ["+c=100", "-c"]]
    events = events_of(steps)

    found = replay(events, rounds=False)

    assert not events.is_repetitive()
    assert (found.peak_allocated_bytes, found.peak_at) == (900, (2, 1))
    assert live_at_peak(events, found, rounds=False) == [(1, 900)]
    assert events_of([steps[0], steps[1], ["+c=900", "-c"]]).is_repetitive()


def test_steps_that_repeat_together_are_one_cycle():
    """A gradient is made in every other step, and dropped in the next, which has the peak."""
    steps = []
    for number in range(1, 6):
        steps += [[f"+gradient{number}=100"], [f"+state{number}=900", f"-state{number}", f"-gradient{number}"]]
    events = events_of(steps, period=2)

    found = replay(events, rounds=False)

    assert events.is_repetitive() and events.growth_bytes() == 0 and found.settles_at_step is not None
    assert found.peak_allocated_bytes == 1000
    assert events.step_at(*found.peak_at) % 2 == 0 and events.step_at(*found.peak_at) > 10
    assert [size for _, size in live_at_peak(events, found, rounds=False)] == [100, 900]
    assert not events_of(steps[:9]).is_repetitive() and events_of(steps[:9]).growth_bytes() == 100


def test_the_first_cycle_may_be_a_part_of_one_and_growth_is_of_a_step():
    steps = [["+a=4"], ["+b=7", "-b"], ["+c=10"], ["+d=7", "-d"], ["+e=10"]]
    events = events_of(steps, period=2)

    assert [events.last_step(cycle) for cycle in (1, 2, 3, 4)] == [1, 3, 5, 7]
    assert [events.step_at(2, place) for place in range(4)] == [2, 2, 2, 3]
    assert [events.step_at(4, place) for place in range(4)] == [6, 6, 6, 7]
    assert events.growth_bytes() == 5 and replay(events, rounds=False).settles_at_step is None


def test_a_replay_that_runs_out_says_so():
    events = events_of([[f"+a={40 * MIB}"], ["-a", f"+b={40 * MIB}"]], build=[f"+weight={20 * MIB}"])

    assert replay(events, 60 * MIB).out_of_memory is None
    found = replay(events, 50 * MIB)
    assert found.out_of_memory is not None and found.settles_at_step is None
