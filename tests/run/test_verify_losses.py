"""Losses with and without a change, and the verdict on a fix, on made-up recordings: exact, and without a process."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.analysis.comparison.losses import AGREE, DIFFER, NOT_COMPARED, RESAMPLED, check_losses
from stepscope.analysis.comparison.verification import Attempt, Expected, Plan, Verification, verify
from stepscope.document.verification import losses_sentence, verification_document
from stepscope.errors import UsageError
from stepscope.findings.fixes import parse_fix
from stepscope.render.terminal import terminal_text
from stepscope.trace.recording import Recording, StepSample

FALLING = {step: 4.0 / (step + 1) for step in range(8)}


def scaled(factor, losses=FALLING):
    return {step: loss * factor for step, loss in losses.items()}


# --- losses


@pytest.mark.parametrize(
    ("arithmetic", "factor", "verdict"),
    [
        *(("same", 1.0, "agree"), ("same", 1.00001, "differ")),
        *(("reordered", 1.0009, "agree"), ("reordered", 1.002, "differ")),
        *(("reduced", 1.019, "agree"), ("reduced", 1.03, "differ"), ("reduced", 0.97, "differ")),
    ],
)
def test_the_tolerance_is_that_of_the_kind_of_fix(arithmetic, factor, verdict):
    found = check_losses([FALLING, FALLING], [scaled(factor)], arithmetic)

    assert (found.verdict, found.num_steps, found.noise_share) == (verdict, 8, 0.0)
    assert found.difference_share == pytest.approx(abs(factor - 1), abs=1e-12)


def test_runs_of_a_script_that_does_not_seed_itself_are_held_to_how_far_they_are_apart():
    others = [FALLING, scaled(1.05)]

    near, far = (check_losses(others, [scaled(factor)], "reordered") for factor in (1.09, 1.3))

    assert near.noise_share == pytest.approx(0.05)
    assert near.limit_share == pytest.approx(0.101)
    assert (near.verdict, far.verdict) == ("agree", "differ")
    assert "5.0 % between two baseline runs" in losses_sentence(near) and "seed" in losses_sentence(near)


def test_where_training_amplifies_rounding_twice_as_much_is_allowed_and_not_before():
    """GIVEN losses that rounding moves from step 4 on THEN a change may move them there, and nowhere else."""
    rounded = {step: loss * (1.1 if step > 3 else 1.0) for step, loss in FALLING.items()}
    late, early = ({s: loss * (1.15 if is_in(s) else 1.0) for s, loss in FALLING.items()} for is_in in (
        lambda step: step > 4, lambda step: step in (2, 5)))  # fmt: skip

    assert check_losses([FALLING], [late], "reordered").verdict == "differ"
    found = check_losses([FALLING], [late], "reordered", rounded=[rounded])
    assert (found.verdict, found.step, found.rounding_share) == ("agree", 5, pytest.approx(0.1))
    assert found.difference_share == pytest.approx(0.15) and found.limit_share == pytest.approx(0.201)
    assert "twice the 10 % that rounding alone" in losses_sentence(found)
    found = check_losses([FALLING], [early], "reordered", rounded=[rounded])
    assert (found.verdict, found.step, found.limit_share) == ("differ", 2, pytest.approx(0.001))


def test_one_run_that_strays_is_not_enough_and_most_are():
    before = [FALLING, FALLING]

    assert check_losses(before, [FALLING, FALLING, scaled(2)], "reordered").verdict == "agree"
    assert check_losses(before, [FALLING, scaled(2), scaled(2)], "reordered").verdict == "differ"


def test_a_loss_that_became_no_number_differs_and_says_where():
    after = {**FALLING, 5: math.nan}

    found = check_losses([FALLING, FALLING], [after], "reduced")

    assert (found.verdict, found.step, found.difference_share, found.after) == ("differ", 5, None, None)
    assert "step 5: not a number instead of 0.666667" in losses_sentence(found)


def test_a_loss_that_has_fallen_to_nearly_nothing_is_held_to_a_tenth_of_the_largest():
    before, after = {0: 1.0, 1: 1e-9}, {0: 1.0, 1: 3e-9}

    assert check_losses([before], [after], "same").verdict == "agree"
    assert check_losses([before], [{0: 1.0, 1: 0.01}], "reduced").difference_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("before", "after", "arithmetic", "why"),
    [
        ([FALLING], [FALLING], "not comparable", "training data"),
        ([{}], [FALLING], "same", "no loss was found"),
        ([FALLING], [{99: 1.0}], "same", "no step in common"),
        ([{0: math.nan}], [{0: 1.0}], "same", "not finite without"),
        ([{0: math.nan, 1: 1.0}, {0: 2.0, 1: 1.0}], [{0: 1.0}], "same", "not finite without"),
    ],
)
def test_what_cannot_be_compared_is_said(before, after, arithmetic, why):
    found = check_losses(before, after, arithmetic)

    assert found.verdict == "not compared" and why in found.reason


# --- the verdict on a fix


def run(
    number,
    step_ms,
    loss=1.0,
    tokens=100,
    images=None,
    flops=None,
    fixes=({"id": "x", "changed": {"it": 1}, "left": {}},),
):
    """A recording: 5 warm-up steps of 10 ms, and clean steps with a little noise."""
    samples = []
    for step in range(20):
        window, ms = ("warmup", 10) if step < 5 else ("clean", step_ms + step % 3 / 100)
        samples.append(StepSample(step, window, 0, int(ms * 1e6), {}, None, tokens, images, 1, 0, 0, loss))
    facts = {"fixes": list(fixes), "flops": {"model_flops_by_dtype": flops or {}}, "environment": {}}
    return Attempt(number, Recording(Path("x"), "finished", facts, tuple(samples), (), None, ()))


def runs(*steps_ms, **given):
    """A rehearsal and rounds; of one figure four rounds that differ a little."""
    rounds = steps_ms if len(steps_ms) > 1 else [steps_ms[0] * (1 + number / 1000) for number in range(4)]
    return [run(number, ms, **given) for number, ms in enumerate((rounds[0], *rounds))]


PLAN = Plan("autocast", "reduced", ["bf16"])


def test_what_a_machine_does_for_a_while_is_not_the_fix():
    found = verify(PLAN, runs(10, 10, 14, 18, 11), runs(9, 9, 12.7, 16.1, 9.95), None)
    alone = verify(PLAN, runs(10, 10, 14, 18, 11), runs(9, 12.7, 16.1, 9.95, 9), None)

    assert (found.status, alone.status) == ("faster", "no difference shown")


def test_a_fix_that_pays_is_faster_with_its_interval_and_what_it_saves():
    found = verify(PLAN, runs(10, 10.1, 10, 10), runs(7, 7.1, 7, 7), Expected(4e6, 0.4, True, "high", None))

    assert found.status == "faster" and found.reason is None
    assert found.saving_ns == pytest.approx(3e6, rel=0.01)
    assert found.change.low < found.change.share < found.change.high < 0
    assert found.change.num_samples == (4, 4)  # the rounds; the rehearsal counts for nothing
    assert [round(pair.before_ns / 1e6) for pair in found.rounds] == [10] * 4
    assert found.change.p_value < 0.001


def test_what_one_run_contradicts_is_no_difference():
    """One run without was as fast as those with: the runs overlap."""
    found = verify(PLAN, runs(10, 10.1, 10.2, 6.9), runs(7, 7.1, 7.2, 7.3), None)

    assert found.change.p_value > 0.05
    assert found.status == "no difference shown"


def test_few_rounds_have_no_verdict_whatever_their_steps_show():
    """Steps of one run are alike: a machine that was busy for one of two runs makes all of them differ."""
    found = verify(PLAN, runs(10, 10, 10), runs(7, 7, 7), None)

    assert found.status == "too few samples" and "3 rounds" in found.reason
    assert found.change.share == pytest.approx(-0.3, abs=0.001)


@pytest.mark.long
def test_two_sides_that_are_the_same_are_seldom_called_different_on_a_restless_machine():
    """Runs that differ by 5 %, steps of one run by 0.2 %."""
    generator, shown = random.Random(0), 0
    for _ in range(200):
        sides = [runs(*(10 * generator.lognormvariate(0, 0.05) for _ in range(4))) for _ in range(2)]
        shown += verify(PLAN, *sides, None).status in ("faster", "slower")

    assert shown <= 10, shown


def test_what_lies_between_steps_counts():
    """Steps of 10 ms that become 5, and an evaluation of 50 ms every fifth step that stays: 20 ms become 15."""

    def with_evaluation(attempt):
        samples = [
            replace(s, host_ns={"evaluation": 50_000_000}, wall_ns=s.wall_ns + 50_000_000) if s.step % 5 == 0 else s
            for s in attempt.recording.samples
        ]
        return replace(attempt, recording=replace(attempt.recording, samples=tuple(samples)))

    before, after = ([with_evaluation(attempt) for attempt in runs(ms)] for ms in (10, 5))
    found = verify(PLAN, before, after, None)

    assert found.status == "faster"
    assert found.saving_ns == pytest.approx(5e6, rel=0.01)
    assert found.change.share == pytest.approx(-0.25, abs=0.005)


def test_a_fast_fix_whose_loss_is_another_is_wrong():
    found = verify(PLAN, runs(10), runs(5, loss=1.5), None)

    assert found.status == "wrong" and found.losses.verdict == "differ" and found.change.verdict == "faster"


def test_a_fix_that_touched_nothing_is_not_applied_and_never_without_gain():
    nothing = {"id": "x", "changed": {}, "left": {}, "nothing_seen": "no optimizer was made"}
    one = {"id": "y", "changed": {"it": 1}, "left": {}, "nothing_seen": ""}

    alone = verify(PLAN, runs(10), runs(10, fixes=[nothing]), None)
    both = verify(PLAN, runs(10), runs(10, fixes=[one, nothing]), None)
    untold = verify(PLAN, runs(10), runs(10, fixes=[]), None)

    assert (alone.status, alone.reason) == ("not applied", "no optimizer was made")
    assert (both.status, both.reason) == ("not applied", "no optimizer was made")
    assert (untold.status, untold.reason) == ("not applied", "the script never imported torch")


def test_products_that_stayed_what_they_were_are_no_proof():
    same = verify(PLAN, runs(10, flops={"fp32": 9}), runs(9, flops={"fp32": 9}), None)
    lower = verify(PLAN, runs(10, flops={"fp32": 10}), runs(9, flops={"fp32": 1, "bf16": 9}), None)

    assert same.status == "not applied" and "no more products run in bf16" in same.reason
    assert lower.status == "faster" and lower.products == {"fp32": (1.0, 0.1), "bf16": (0.0, 0.9)}


def test_sums_of_few_digits_in_another_order_may_differ_as_fewer_digits_do():
    plan = Plan("compile", "reordered")
    wide, narrow = ({"flops": {dtype: 9}} for dtype in ("fp32", "bf16"))

    assert verify(plan, runs(10, **wide), runs(9, loss=1.01, **wide), None).status == "wrong"
    assert verify(plan, runs(10, **narrow), runs(9, loss=1.01, **narrow), None).status == "faster"
    strict = Plan("compile", "reordered", tolerance_share=0.001)
    assert verify(strict, runs(10, **narrow), runs(9, loss=1.01, **narrow), None).status == "wrong"


def test_a_larger_batch_is_compared_by_tokens_a_second_and_others_must_not_change_it():
    plan = Plan("small_batch", "not comparable")
    found = verify(plan, runs(10), runs(15, tokens=200), None)
    other = verify(PLAN, runs(10), runs(9, tokens=120), None)

    assert found.status == "faster" and found.change.metric == "tokens_per_second" and found.saving_ns is None
    assert found.change.share == pytest.approx(1 / 3, rel=0.02)
    assert verify(plan, runs(10), runs(25, tokens=200), None).status == "slower"
    assert other.status == "not comparable" and "120.0 tokens" in other.reason


@pytest.mark.parametrize(
    ("before", "after", "metric", "verdict"),
    [
        ((100, 8), (10, 8), "step_time", "agree"),  # less padding
        ((100, 8), (100, 2), "step_time", "agree"),  # packed
        ((100, 8), (200, 16), "tokens_per_second", "not compared"),
        ((None, 8), (None, 16), "samples_per_second", "not compared"),
        ((None, None), (100, 8), "step_time", "agree"),
    ],
)
def test_a_change_by_hand_is_compared_by_the_work_that_is_equal(before, after, metric, verdict):
    plan = Plan("packing", "by hand", script="after.py")
    sides = [runs(ms, tokens=work[0], images=work[1], fixes=()) for ms, work in ((10, before), (7, after))]

    found = verify(plan, *sides, None)

    assert (found.status, found.change.metric, found.losses.verdict) == ("faster", metric, verdict)
    assert found.script == "after.py" and (found.saving_ns is None) == (metric != "step_time")


def test_a_change_by_hand_with_other_losses_is_wrong():
    found = verify(Plan("it", "by hand", script="after.py"), runs(10, fixes=()), runs(7, loss=1.2, fixes=()), None)

    assert (found.status, found.losses.chance_share) == ("wrong", 0)


@pytest.mark.parametrize("after", [math.nan, math.inf])
def test_a_change_by_hand_that_loses_the_loss_is_wrong(after):
    before = [dict.fromkeys(range(28), 1.0)] * 2
    found = check_losses(before, [{step: after if step > 9 else 1.0 for step in range(28)}], "by hand")

    assert (found.verdict, found.step, found.difference_share) == ("differ", 10, None)


def test_a_change_by_hand_has_no_excuse_in_a_few_steps():
    """Nobody knows that it draws other random numbers; where the data does, means of so few say nothing."""
    sides = [dict.fromkeys(range(12), 1.0)], [dict.fromkeys(range(12), 50.0)]

    assert check_losses(*sides, "by hand").verdict == "differ"
    assert check_losses(*sides, "resampled").verdict == "not compared"


def test_losses_are_held_to_the_steps_of_the_rehearsal():
    """Rounding grows from step to step, and the timed runs may be longer."""
    later = [replace(step, step=step.step + 20, loss=9.0) for step in run(1, 7).recording.samples]
    longer = [replace(a, recording=replace(a.recording, samples=(*a.recording.samples, *later))) for a in runs(7)]

    assert verify(Plan("compile", "reordered"), runs(10), longer, None).losses.verdict == "agree"


def test_a_failure_is_a_result_and_so_is_a_script_that_ends_early():
    short = [
        Attempt(a.round, Recording(Path(), "", a.recording.facts, a.recording.samples[:3], (), None, ()))
        for a in runs(9)
    ]

    assert verify(PLAN, runs(10), [Attempt(0, None, "OOM")], None).reason == "OOM"
    assert "ended after 3 steps" in verify(PLAN, runs(10), short, None).reason


def test_the_exit_code_and_the_text_say_the_worst():
    faster = verify(PLAN, runs(10), runs(7), Expected(4e6, 0.4, True, "high", None))
    wrong = verify(PLAN, runs(10), runs(7, loss=9.0), None)
    missing = verify(PLAN, runs(10), runs(10, fixes=[]), None)

    def whole(*fixes):
        return Verification("train.py", "runs/x", "CPU", "2.9", 2, 10e6, 0.012, fixes, ("the script has changed",))

    assert [whole(*each).exit_code for each in ([faster], [missing, faster], [missing, wrong])] == [0, 4, 3]
    text = terminal_text(verification_document(whole(missing, wrong, faster)), 100)
    assert "3 fixes: 1 faster, 1 wrong, 1 not applied." in text
    assert "up to 4.00 ms less per step, −40.0 %" in text and "high confidence" in text
    assert "by up to 1.2 %" in text and "the script has changed" in text
    assert text.index("autocast: faster") < text.index("autocast: wrong") < text.index("autocast: not applied")
    assert all(len(line) <= 100 for line in text.splitlines())


# --- fixes as they are typed


def test_fixes_joined_by_a_plus_are_held_to_the_widest_tolerance():
    assert parse_fix("pageable_copies+unfused_optimizer").arithmetic == "reordered"
    assert parse_fix("waiting_for_data=4+unfused_optimizer").arithmetic == "resampled"
    assert parse_fix("compile=max-autotune+autocast").text == "compile=max-autotune+autocast"
    assert parse_fix("small_batch=0.5").arithmetic == "not comparable"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("autocst", "Unknown fix 'autocst'. Choose from fp32_matmul"),
        ("compile=fast", "compile must be default or max-autotune"),
        ("autocast=fp16", "autocast is not allowed"),
        ("waiting_for_data=1.5", "waiting_for_data must be N"),
        ("small_batch=-1", "small_batch must be 2 or N"),
        ("attention_backend=", "attention_backend must be flash"),
    ],
)
def test_a_mistake_in_a_fix_is_one_line(text, said):
    with pytest.raises(UsageError, match=said):
        parse_fix(text)


def noisy(seed: int, shift: float = 0.0, num: int = 40) -> dict[int, float]:
    rng = random.Random(seed)
    return {step: 3 - step / 40 + shift + rng.gauss(0, 0.2) for step in range(num)}


def test_other_random_numbers_of_the_data_are_told_by_means():
    found = check_losses([noisy(0), noisy(0)], [noisy(1), noisy(1)], RESAMPLED)
    assert found.verdict == AGREE and found.chance_share and found.step is None
    assert "draws random numbers" in losses_sentence(found)
    worse = check_losses([noisy(0)], [noisy(1, shift=0.8)], RESAMPLED)
    assert worse.verdict == DIFFER and worse.difference_share == pytest.approx(0.8 / 2.5, abs=0.06)


def test_data_without_random_numbers_is_compared_step_by_step():
    found = check_losses([noisy(0)], [noisy(0)], RESAMPLED)
    assert (found.verdict, found.difference_share, found.chance_share) == (AGREE, 0.0, None)


def test_few_steps_are_not_compared_by_means():
    found = check_losses([noisy(0, num=10)], [noisy(1, num=10)], RESAMPLED)
    assert found.verdict == NOT_COMPARED and "too few" in (found.reason or "")
