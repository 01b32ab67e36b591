"""Which events end a step: plain loops, GANs, critics, quiet optimizers, a surer source that comes late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepscope.recorder.step_ends import (
    EXPLICIT,
    FORWARD,
    MAX_STEPS_OF_ONE,
    MAX_TURNS,
    OPTIMIZER,
    Boundary,
    StepFinder,
)

SHORT = {Boundary.NONE: ".", Boundary.JOIN: "J", Boundary.END: "E", Boundary.RESTART: "R"}


def boundaries(finder: StepFinder, whos: str, source: str = OPTIMIZER) -> str:
    """One letter an event: `.` goes on, `J` joins those before, `E` ends, `R` restarts."""
    return "".join(SHORT[finder.saw(source, who)] for who in whos)


def test_one_optimizer_ends_a_step_each_time():
    finder = StepFinder()

    assert boundaries(finder, "AAAA") == "EEEE"
    assert (finder.source, finder.num_sources) == (OPTIMIZER, 1)


def test_a_gan_has_one_step_for_both_optimizers():
    finder = StepFinder()

    assert boundaries(finder, "DGDGDG") == "EEJE.E"
    assert (finder.num_sources, finder.num_joined) == (2, 2)


def test_a_critic_may_step_several_times():
    finder = StepFinder()

    assert boundaries(finder, "CCCCCGC") == "EEEEEEJ"
    assert finder.num_joined == 6
    assert boundaries(finder, "CCCCGCCCCCG") == "....E.....E"


def test_an_outer_optimizer_without_a_backward_of_its_own_ends_no_step():
    """Local SGD: it moves the parameters by the sum of many steps; of new clients' too."""
    finder = StepFinder()
    assert boundaries(finder, "IIII") == "EEEE"
    for _ in range(3):
        assert finder.saw(OPTIMIZER, "O", has_backward=False) is Boundary.NONE
        assert boundaries(finder, "IIII") == "EEEE" and finder.num_sources == 1
    assert boundaries(finder, "JJJJ") == "EEEE" and finder.saw(OPTIMIZER, "O", has_backward=False) is Boundary.NONE


def test_optimizers_that_share_a_backward_make_up_one_step():
    finder = StepFinder()
    found = [finder.saw(OPTIMIZER, who, has_backward=who == "A") for who in "ABABAB"]
    assert "".join(SHORT[one] for one in found) == "EEJE.E"


def test_three_optimizers_in_any_order():
    finder = StepFinder()

    assert boundaries(finder, "ABCABCCBABAC") == "EEEJ.E..E..E"
    assert (finder.num_sources, finder.num_joined) == (3, 3)


def test_one_that_comes_back_after_two_turns_of_the_others_was_part_of_their_steps():
    """Soft actor-critic: two updates of the critic, then two of the actor and of the temperature, by turns."""
    finder = StepFinder()

    assert boundaries(finder, "QAtAtQ") == "EEEJEJ"
    assert (finder.num_sources, finder.num_joined) == (3, 3)
    assert boundaries(finder, "QAtAtQQAt") == "..E..E..E"


def test_models_that_are_trained_one_after_another_go_on_counting():
    finder = StepFinder()

    assert boundaries(finder, "AAABBBCCCCDE") == "E" * 12
    assert (finder.num_sources, finder.num_earlier) == (1, 0)


def test_a_gan_in_each_of_several_folds_joins_only_its_own_first_steps():
    finder = StepFinder()

    assert boundaries(finder, "DGDGDGdgdgdg") == "EEJE.EEEJE.E"
    assert (finder.num_sources, finder.num_joined) == (2, 2)


def test_one_that_trained_alone_for_long_joins_its_partner_with_its_last_step():
    finder = StepFinder()

    assert boundaries(finder, "D" * 40 + "GDG") == "E" * 41 + "JE"
    assert finder.num_joined == 2


def test_models_that_each_step_several_times_in_a_row_take_turns():
    """A population of three, eight steps each: none of them is the other's critic."""
    finder = StepFinder()

    assert set(boundaries(finder, ("A" * 8 + "B" * 8 + "C" * 8) * 3)) == {"E"}
    assert finder.num_sources == 1


def test_heads_that_are_trained_by_turns_with_their_trunk_make_one_step_each():
    finder = StepFinder()
    heads = "abacbacab"
    seen = boundaries(finder, "".join("T" + head for head in heads))

    assert seen[-8:] == ".E.E.E.E"
    assert boundaries(StepFinder(), "".join(head + "T" for head in heads))[-8:].count("E") == 4


def test_models_that_take_turns_for_long_are_no_partners():
    finder = StepFinder()

    assert set(boundaries(finder, ("A" * 20 + "B" * 20) * 4)) == {"E"}


def test_an_optimizer_that_goes_quiet_is_given_up():
    finder = StepFinder()
    boundaries(finder, "AB")
    seen = boundaries(finder, "A" * (MAX_STEPS_OF_ONE + 3))

    assert seen == "J" + "." * (MAX_STEPS_OF_ONE - 1) + "R" + "EE"
    assert (finder.num_sources, finder.num_earlier) == (1, MAX_STEPS_OF_ONE)


def test_one_that_comes_back_is_taken_in_again():
    finder = StepFinder()
    boundaries(finder, "AB" + "A" * (MAX_STEPS_OF_ONE + 1))

    assert boundaries(finder, "BABAB") == "EJE.E"
    assert finder.num_joined == 2


def test_sixteen_critic_steps_are_not_yet_quiet():
    finder = StepFinder()
    boundaries(finder, "ABAB")

    assert boundaries(finder, "A" * MAX_STEPS_OF_ONE + "B") == "." * MAX_STEPS_OF_ONE + "E"


def test_a_surer_source_restarts_the_count_and_a_less_sure_one_is_not_heard():
    finder = StepFinder()

    assert boundaries(finder, "MM", FORWARD) == "EE"
    assert boundaries(finder, "A") == "R"
    assert boundaries(finder, "MM", FORWARD) == ".."
    assert boundaries(finder, "A") == "E"
    assert boundaries(finder, "x", EXPLICIT) == "R"
    assert boundaries(finder, "AB") == ".."
    assert boundaries(finder, "x", EXPLICIT) == "E"
    assert finder.source == EXPLICIT


def test_the_first_event_of_all_ends_a_step_without_a_restart():
    for source in (FORWARD, OPTIMIZER, EXPLICIT):
        assert StepFinder().saw(source, "A") is Boundary.END


def test_two_root_modules_in_an_inference_loop_make_one_step():
    finder = StepFinder()

    assert boundaries(finder, "ABABAB", FORWARD) == "EEJE.E"


EVENTS = st.lists(
    st.tuples(st.sampled_from([FORWARD, OPTIMIZER, EXPLICIT]), st.integers(0, 3)).map(
        lambda event: (event[0], EXPLICIT) if event[0] == EXPLICIT else event
    ),
    max_size=200,
)


@given(EVENTS)
def test_explicit_steps_always_win(events):
    finder, said = StepFinder(), False
    for source, who in events:
        boundary = finder.saw(source, who)
        if source == EXPLICIT:
            assert boundary is (Boundary.END if said or finder_was_new(events) else Boundary.RESTART)
            said = True
        elif said:
            assert boundary is Boundary.NONE
    assert not said or finder.source == EXPLICIT


def finder_was_new(events: list[tuple[str, object]]) -> bool:
    """Whether the explicit step came before anything else."""
    return events[0][0] == EXPLICIT


@given(EVENTS)
def test_a_source_only_ever_gets_surer_and_every_change_of_it_is_a_restart(events):
    finder, rank = StepFinder(), {None: 0, FORWARD: 1, OPTIMIZER: 2, EXPLICIT: 3}
    for position, (source, who) in enumerate(events):
        before = (finder.source, finder.num_sources)
        boundary = finder.saw(source, who)
        after = (finder.source, finder.num_sources)

        assert rank[after[0]] >= rank[before[0]]
        if before[0] != after[0]:
            assert boundary is (Boundary.RESTART if position else Boundary.END)
        elif before != after:
            assert boundary is not Boundary.NONE


@given(st.lists(st.integers(0, 2), min_size=1, max_size=300))
def test_a_step_never_ends_before_each_that_is_known_has_stepped(whos):
    finder = StepFinder()
    since: set[int] = set()
    num_turns = 0
    for who in whos:
        boundary = finder.saw(OPTIMIZER, who)
        num_turns += boundary is Boundary.RESTART
        since.add(who)
        if boundary is Boundary.END and num_turns <= MAX_TURNS:
            assert len(since) >= finder.num_sources
        if boundary in (Boundary.END, Boundary.RESTART):
            since.clear()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=300))
def test_no_more_steps_are_joined_than_have_ended(whos):
    finder, num_ended = StepFinder(), 0
    for who in whos:
        boundary = finder.saw(OPTIMIZER, who)
        if boundary is Boundary.JOIN:
            assert 1 <= finder.num_joined <= num_ended
            num_ended -= finder.num_joined - 1
        num_ended += boundary in (Boundary.END, Boundary.RESTART)
