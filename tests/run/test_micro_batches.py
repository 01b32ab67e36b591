"""Larger micro-batches from outside: the same samples and the same losses in half as many passes, or a refusal."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from stepscope.analysis.comparison.micro_batches import why_not_applied, why_not_larger
from stepscope.analysis.comparison.verification import Attempt, Plan, gate, verify
from stepscope.findings.fixes import code_of, parse_change, parse_fix
from stepscope.recorder.fixes import change_words
from stepscope.recorder.fixes.words import regroup
from stepscope.trace.recording import Recording, StepSample

# --- the command line


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("--grad-accum 8 --batch-size 4", "--grad-accum 4 --batch-size 8"),
        ("--gradient_accumulation_steps=40 --batch_size=12", "--gradient_accumulation_steps=20 --batch_size=24"),
        ("--accum_iter 2 -b 64 --lr 2", "--accum_iter 1 -b 128 --lr 2"),
        (
            "trainer.accumulate_grad_batches=8 data.batch_size=4",
            "trainer.accumulate_grad_batches=4 data.batch_size=8",
        ),
        (
            "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 8",
            "--per_device_train_batch_size 8 --per_device_eval_batch_size 4 --gradient_accumulation_steps 4",
        ),
        ("--micro-batch-size 4 --global-batch-size 32", "--micro-batch-size 8 --global-batch-size 32"),
        ("--grad-accum 8", None),
        ("--batch-size 4 --num-batches 8", None),
        ("--grad-accum many --batch-size 4", None),
    ],
)
def test_a_command_line_that_names_both_numbers_is_changed(words, changed):
    argv = ["train.py", *words.split()]
    after, told = regroup(argv, 2)

    assert after == (argv if changed is None else ["train.py", *changed.split()])
    assert (told is None) == (changed is None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--grad-accum 5 --batch-size 4", "--grad-accum 5 is not a multiple of 2"),
        ("--grad-accum 4 --batch-size 4 --text-batch-size 2", "several such options: batch-size, text-batch-size"),
    ],
)
def test_a_command_line_that_cannot_be_changed_says_why(words, why):
    after, told = regroup(words.split(), 2)

    assert after == words.split() and why in told.problem


def test_looking_changes_no_word_and_another_fix_neither():
    argv = ["train.py", "--grad-accum", "8", "--batch-size", "4"]
    assert change_words("?autocast+micro_batch", argv).new == "--grad-accum 4 --batch-size 8"
    assert change_words("autocast+compile=max-autotune", argv) is None and argv[2] == "8"
    assert change_words("autocast+micro_batch=4", argv).size == 4 and argv[2::2] == ["2", "16"]


# --- libraries, each with the attributes that the fix uses


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins for Transformers, Accelerate and Lightning."""

    class Accelerator:
        def __init__(self, gradient_accumulation_steps=1):
            self.gradient_accumulation_steps = gradient_accumulation_steps

        def prepare_data_loader(self, loader):
            return loader

    class HuggingFace:
        def __init__(self, model=None, args=None):
            self.args, self.accelerator = args, Accelerator(args.gradient_accumulation_steps)

    class Lightning:
        def __init__(self, *, accumulate_grad_batches=1, limit_train_batches=1.0):
            self.accumulate_grad_batches, self.limit_train_batches = accumulate_grad_batches, limit_train_batches

    class Connector:
        def __init__(self, trainer):
            self.trainer = trainer

        def _prepare_dataloader(self, loader, shuffle, mode):
            return loader

    made = {
        "transformers.trainer": {"Trainer": HuggingFace},
        "accelerate.accelerator": {"Accelerator": Accelerator},
        "lightning.pytorch.trainer.trainer": {"Trainer": Lightning},
        "lightning.pytorch.trainer.connectors.data_connector": {"_DataConnector": Connector},
    }
    for name, kinds in made.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**kinds))
    return types.SimpleNamespace(
        accelerator=Accelerator, trainer=HuggingFace, lightning=Lightning, connector=Connector
    )


def arguments(number=8, size=4):
    given = types.SimpleNamespace
    return type("Arguments", (given,), {})(gradient_accumulation_steps=number, per_device_train_batch_size=size)


def loader(num_samples=64, size=4, **given):
    return DataLoader(torch.arange(num_samples), batch_size=size, **given)


def facts(fixes):
    return fixes.finish()[0]


def test_the_trainers_arguments_are_changed_once(apply, libraries):
    fixes, given = apply("micro_batch"), arguments()
    trainers = [libraries.trainer(args=given), libraries.trainer(None, given)]

    assert (given.gradient_accumulation_steps, given.per_device_train_batch_size) == (4, 8)
    assert trainers[0].accelerator.gradient_accumulation_steps == 4, "its own Accelerator is not divided again"
    found = facts(fixes)
    assert list(found["changed"].values()) == [1] and found["left"] == {}
    line = "TrainingArguments(…, per_device_train_batch_size=8, gradient_accumulation_steps=4)"
    assert code_of("micro_batch", {"micro_batch": found["value"]}, "cuda") == [line]


def test_accelerate_divides_its_number_and_the_loaders_keep_their_samplers(apply, libraries):
    fixes = apply("micro_batch=4")
    torch.manual_seed(0)
    plain = torch.cat(list(loader(shuffle=True))).tolist()
    torch.manual_seed(0)
    accelerator, data = libraries.accelerator(8), loader(shuffle=True)
    sampler = data.sampler
    prepared = accelerator.prepare_data_loader(accelerator.prepare_data_loader(data))

    batches = list(prepared)
    assert accelerator.gradient_accumulation_steps == 2 and prepared.sampler is sampler
    assert [len(batch) for batch in batches] == [16] * 4 and len(prepared) == 4 and prepared.batch_size == 16
    assert torch.cat(batches).tolist() == plain, "the same samples in the same order"
    assert (
        facts(fixes)["value"] == "Accelerator(…, gradient_accumulation_steps=2)  # and DataLoader(…, batch_size=16)"
    )


def test_lightning_divides_its_number_and_only_loaders_for_training_are_larger(apply, libraries):
    fixes = apply("micro_batch")
    trainer = libraries.lightning(accumulate_grad_batches=2)
    training, evaluation = loader(), loader()
    connector = libraries.connector(trainer)
    connector._prepare_dataloader(training, shuffle=True, mode=types.SimpleNamespace(value="train"))
    connector._prepare_dataloader(evaluation, shuffle=False, mode=types.SimpleNamespace(value="validate"))

    assert trainer.accumulate_grad_batches == 1 and (training.batch_size, evaluation.batch_size) == (8, 4)
    assert "accumulate_grad_batches=1)  # and DataLoader(…, batch_size=8)" in facts(fixes)["value"]


def test_looking_changes_nothing_and_says_what_it_would(apply, libraries):
    fixes, given = apply("?micro_batch"), arguments()
    accelerator, data = libraries.accelerator(8), loader()
    libraries.trainer(args=given)
    accelerator.prepare_data_loader(data)

    assert (given.gradient_accumulation_steps, accelerator.gradient_accumulation_steps, data.batch_size) == (8, 8, 4)
    assert len(facts(fixes)["changed"]) == 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: loader(size=None), "has no batch_size"),
        (lambda: DataLoader(torch.arange(4), batch_sampler=[[0, 1], [2, 3]]), "has no batch_size"),
        (lambda: loader(60, drop_last=True), "drop_last would leave 4 samples of each epoch out instead of 0"),
        (lambda: loader(64, drop_last=True), None),
        (lambda: DataLoader(Stream(), batch_size=4, drop_last=True), None),
        (None, "Accelerator was given no DataLoader"),
    ],
)
@pytest.mark.parametrize("look", ["?", ""])
def test_loaders_that_cannot_have_larger_batches_are_refused(apply, libraries, look, data, why):
    fixes = apply(f"{look}micro_batch")
    accelerator = libraries.accelerator(4)
    if data is not None:
        accelerator.prepare_data_loader(data())

    found = facts(fixes)
    assert bool(found["changed"]) == (why is None)
    assert why is None or why in next(iter(found["left"]))


def test_a_trainers_loader_that_would_drop_other_samples_is_refused(apply, libraries):
    for look, size in (("?", 4), ("", 8)):
        fixes = apply(f"{look}micro_batch")
        libraries.trainer(args=arguments())
        loader(60, size, drop_last=True)
        assert "drop_last would leave 4 samples" in next(iter(facts(fixes)["left"]))
        fixes.remove()


def test_what_counts_micro_batches_or_normalizes_them_is_refused(apply, libraries):
    fixes = apply("micro_batch")
    trainer = libraries.lightning(accumulate_grad_batches=4, limit_train_batches=10)
    libraries.connector(trainer)._prepare_dataloader(loader(), True, types.SimpleNamespace(value="train"))
    assert "limit_train_batches=10 counts micro-batches" in next(iter(facts(fixes)["left"]))
    fixes.remove()

    for training, refused in ((True, True), (False, False)):
        fixes = apply("micro_batch")
        libraries.trainer(args=arguments())
        fixes.use_roots([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train(training)])
        assert ("BatchNorm1d normalizes each micro-batch" in str(facts(fixes)["left"])) == refused
        fixes.remove()


def test_a_number_that_cannot_be_divided_is_told_and_no_accumulation_is_nothing(apply, libraries):
    fixes = apply("micro_batch")
    libraries.accelerator(5), libraries.accelerator(1)
    libraries.trainer(args=arguments(number=1))

    found = facts(fixes)
    assert found["changed"] == {} and found["left"] == {"gradient_accumulation_steps=5 is not a multiple of 2": 1}


def test_dropout_draws_other_masks_and_says_so(apply):
    fixes = apply("micro_batch")
    fixes.use_roots([nn.Sequential(nn.Dropout(0.1)).eval(), nn.Dropout(0.0)])
    assert not facts(fixes)["resamples"]
    fixes.use_roots([nn.Sequential(nn.Dropout(0.1))])
    assert facts(fixes)["resamples"]


# --- what its run proves


def run(number, ms=10, micro_batches=8, samples=32, loss_sum=1.0, loss=0.1, tokens=None, changed=True, **fix):
    lines = [
        StepSample(
            step, "warmup" if step < 5 else "clean", 0, int((ms + step % 3 / 100) * 1e6), {}, None, tokens, samples,
            micro_batches, 0, 0, loss, {}, loss_sum,
        )
        for step in range(28)
    ]  # fmt: skip
    fixes = [{"id": "micro_batch", "changed": {"it": 1} if changed else {}, "left": {}, "nothing_seen": "", **fix}]
    recording = Recording(Path("x"), "finished", {"fixes": fixes, "environment": {}}, tuple(lines), (), None, ())
    return Attempt(number, recording)


def runs(**given):
    return [run(number, **given) for number in range(5)]


def verified(text="micro_batch", **given):
    chosen = parse_fix(text)
    return verify(Plan(text, chosen.arithmetic, growth=chosen.growth), runs(), runs(ms=6, **given), None)


def test_half_as_many_micro_batches_with_the_same_losses_are_faster():
    found = verified(micro_batches=4, loss=0.2)

    assert (found.status, found.losses.verdict, found.losses.before) == ("faster", "agree", 1.0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"micro_batches": 8}, "step 0 has 32 samples in 8 micro-batches with it, and 32 samples in 8 without"),
        ({"micro_batches": 8, "samples": 64}, "step 0 has 64 samples in 8 micro-batches with it"),
        ({"micro_batches": 4, "samples": 16}, "step 0 has 16 samples in 4 micro-batches with it"),
        ({"micro_batches": 4, "samples": None}, "step 0 has unknown samples in 4 micro-batches with it"),
        ({"micro_batches": 2, "samples": 32}, "step 0 has 32 samples in 2 micro-batches with it"),
    ],
)
def test_other_work_per_step_is_refused(given, why):
    found = verified(**given)

    assert found.status == "not applied" and why in found.reason


def test_one_other_step_is_enough_to_refuse():
    before, after = run(0).recording, run(0, micro_batches=4).recording
    last = replace(after.samples[20], num_samples=28)
    other = replace(after, samples=(*after.samples[:20], last, *after.samples[21:]))

    assert why_not_larger(before, after, 2) is None
    assert "step 20 has 28 samples" in why_not_larger(before, other, 2)
    assert why_not_larger(before, before, 1) == "no step has fewer micro-batches with it"


def test_a_last_group_of_fewer_micro_batches_is_the_same_work_and_so_is_more_padding():
    before, after = run(0, tokens=100).recording, run(0, tokens=120, micro_batches=4).recording
    sides = [
        replace(one, samples=(*one.samples[:20], replace(one.samples[20], num_samples=12, num_micro_batches=number)))
        for one, number in ((before, 3), (after, 2))
    ]

    assert why_not_larger(*sides, 2) is None


def test_a_script_that_accumulates_itself_is_told_what_to_change():
    reason = verified(changed=False).reason

    assert reason == why_not_applied(run(0).recording, ())
    assert "accumulates 8 micro-batches of 4: make 4 of 8 in a copy" in reason and len(reason) <= 160
    assert why_not_applied(run(0, micro_batches=1).recording, ()) == "a step has one micro-batch"
    assert parse_change("micro_batch=train.py").growth == 1 and parse_fix("autocast+micro_batch=4").growth == 4


def test_gradients_that_are_half_as_large_differ_although_the_last_losses_agree():
    """GIVEN a script that does not divide its losses THEN half as many of the same size are half of the objective."""
    found = verified(micro_batches=4, loss=0.1, loss_sum=0.5)

    assert (found.status, found.losses.difference_share) == ("wrong", 0.5)
    assert verified(micro_batches=4, loss=0.1, loss_sum=None).losses.verdict == "not compared"


def test_with_one_micro_batch_left_its_loss_is_the_sum():
    plan = Plan("micro_batch=8", "reordered", growth=8)

    assert gate(plan, runs(), runs(micro_batches=1, loss=1.0, loss_sum=None)).verdict == "agree"
    assert gate(plan, runs(), runs(loss=0.2)).verdict == "differ", "with as many, the last ones are compared"


def test_with_dropout_the_means_are_compared():
    apart = {"micro_batches": 4, "loss_sum": 1.03}

    assert verified(**apart).status == "wrong" and verified(**apart, resamples=True).losses.arithmetic == "resampled"
