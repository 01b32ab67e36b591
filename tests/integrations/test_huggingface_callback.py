"""The callback of the Hugging Face Trainer: the same recording as `stepscope run`, whatever the training does."""

from __future__ import annotations

import copy
import json
import os
import pickle
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_callback import PrinterCallback

import stepscope
from forks import Forks, settings
from stepscope.integrations.huggingface import StepscopeCallback
from stepscope.recorder import current, wall
from stepscope.recorder.windows import Windows
from stepscope.trace.recording import Recording, read_recording
from stepscope.trackers.figures import figures

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers
WINDOWS = Windows(warmup=2, clean=2, trace=0, memory=1)
CONFIG = {
    "vocab_size": 32,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def trainer(folder: Path, *callbacks: TrainerCallback, **arguments: object) -> Trainer:
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (32, 8))]
    given = {"max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 2, "save_strategy": "no"} | arguments
    made = Trainer(
        GPT2LMHeadModel(GPT2Config(**CONFIG)),
        TrainingArguments(str(folder / "out"), use_cpu=True, report_to="none", disable_tqdm=True, **given),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=list(callbacks),
    )
    made.remove_callback(PrinterCallback)
    return made


@pytest.fixture
def told(monkeypatch):
    """What is said on standard error."""
    lines: list[str] = []
    monkeypatch.setattr(wall, "tell", lines.append)
    return lines


class After(TrainerCallback):
    """Calls a function at the end of one step."""

    def __init__(self, step: int, function) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.function()


class Tracker(TrainerCallback):
    """A tracker as the Trainer adds it, before the callbacks of the user."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logged.append(dict(logs))


def facts_of(recording: Recording) -> list[object]:
    """All that must be equal however a training was recorded: everything but times."""
    asides = [None if aside is None else dict(aside.num_times) for aside in (recording.lead, recording.tail)]
    steps = [
        (each.step, each.num_tokens, each.num_samples, each.num_micro_batches, each.num_times or {})
        for each in recording.samples
    ]
    return [recording.status, asides, steps]


CLOCK = """
import time

now_ns = 10**12
time.perf_counter_ns = lambda: now_ns

def advance(ms):
    global now_ns
    now_ns += ms * 1_000_000
"""
"""A clock that only the script moves, from the start of the process: a busy machine changes nothing."""
SCRIPT = """
    import json, sys, torch
    from pathlib import Path
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from stepscope.integrations.huggingface import StepscopeCallback

    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (32, 8))]
    arguments = TrainingArguments(
        "out", max_steps=14, per_device_train_batch_size=2, gradient_accumulation_steps=2, eval_strategy="steps",
        eval_steps=5, eval_on_start=True, save_steps=5, logging_steps=2, report_to="none", use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [StepscopeCallback("alone")] if "callback" in sys.argv else []
    model = GPT2LMHeadModel(GPT2Config(**json.loads(sys.argv[1])))
    from sitecustomize import advance
    from transformers import default_data_collator
    model.register_forward_pre_hook(lambda *_: advance(30))
    model.transformer.wpe.weight.register_hook(lambda _: advance(50))
    collator = lambda rows: advance(7) or default_data_collator(rows)
    trainer = Trainer(model, arguments, collator, rows, rows[:16], callbacks=callbacks)
    trainer.train()
    Path("history.json").write_text(json.dumps(trainer.state.log_history))
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """One script recorded by the callback, by `stepscope run`, and by both."""
    (site := tmp_path_factory.mktemp("site") / "sitecustomize.py").write_text(CLOCK)
    given = settings()
    given["PYTHONPATH"] = os.pathsep.join([str(site.parent), given["PYTHONPATH"]])
    forks, folders = Forks(given, "transformers.trainer"), {}
    run = ["-m", "stepscope", "run", "--quiet", "-o", "run"]
    for name, before, callback in (("alone", [], True), ("run", run, False), ("both", run, True)):
        folders[name] = folder = tmp_path_factory.mktemp(name)
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
        words = [*before, "train.py", json.dumps(CONFIG), *(["callback"] if callback else [])]
        exit_code, _, stderr = forks.run(words, folder, {})
        assert exit_code == 0, stderr
    forks.close()
    return folders


def test_steps_tokens_micro_batches_and_phases_are_those_of_stepscope_run(three):
    alone, run = read_recording(three["alone"] / "alone"), read_recording(three["run"] / "run")

    assert facts_of(alone) == facts_of(run)
    assert [each.num_tokens for each in alone.samples] == [32] * 14
    assert [each.num_micro_batches for each in alone.samples] == [2] * 14
    between = {each.step: each.num_times for each in alone.samples if each.num_times}
    assert [step for step, times in between.items() if "evaluation" in times and "checkpoint" in times] == [5, 10]
    assert (alone.lead.num_times, alone.tail.num_times) == (
        {"evaluation": 1},
        {"evaluation": 1, "checkpoint": 1},
    )


def test_times_and_throughput_are_those_of_stepscope_run(three):
    alone, run = read_recording(three["alone"] / "alone"), read_recording(three["run"] / "run")

    assert [each.host_ns for each in alone.samples] == [each.host_ns for each in run.samples]
    typical = {name: ns / 1e6 for name, ns in alone.samples[3].host_ns.items() if ns}
    assert typical == {"data": 14, "forward": 60, "backward": 100}
    cards = [stepscope.read(each.folder).to_json() for each in (alone, run)]
    assert cards[0]["throughput"] == cards[1]["throughput"] and cards[0]["phases"] == cards[1]["phases"]


@pytest.mark.parametrize("name", ["alone", "run"])
def test_evaluations_and_checkpoints_begin_where_the_trainer_calls_them(name, three):
    places = read_recording(three[name] / name).facts["between"]

    assert {place.split()[-1] for place in places["evaluation"]} == {"_evaluate"}
    assert {place.split()[-1] for place in places["checkpoint"]} == {"_maybe_log_save_evaluate"}


def test_under_stepscope_run_there_is_one_recording_and_no_step_counts_twice(three):
    both = read_recording(three["both"] / "run")

    assert facts_of(both) == facts_of(read_recording(three["run"] / "run"))
    assert not (three["both"] / "alone").exists()
    assert both.facts["steps"]["source"] == "step()"


def test_the_last_figures_in_the_logs_are_those_of_the_card(tmp_path, recorder_uses):
    now_ns = [1_000_000_000]  # a clock that only forwards move: a busy machine changes nothing
    recorder_uses(lambda: now_ns[0])
    made = trainer(tmp_path, StepscopeCallback(tmp_path / "run", windows=WINDOWS), max_steps=40)
    made.model.register_forward_pre_hook(lambda *_: now_ns.__setitem__(0, now_ns[0] + 10_000_000))
    made.train()

    logged, card = made.state.log_history[-1], stepscope.read(tmp_path / "run").to_json()
    assert logged["stepscope/steps"] == card["num_steps"] == 40
    assert logged["stepscope/tokens_per_second"] == pytest.approx(card["throughput"]["per_s"], rel=0.01)
    assert logged["stepscope/tokens_per_second"] == pytest.approx(2 * 8 / 0.010, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_the_last_figures_in_the_logs_include_the_evaluation_at_the_end(tmp_path, recorder_uses, num_epochs):
    now_ns = [1_000_000_000]
    recorder_uses(lambda: now_ns[0])
    callback = StepscopeCallback(tmp_path / "run", windows=WINDOWS)
    made = trainer(tmp_path, callback, max_steps=-1, num_train_epochs=num_epochs, eval_strategy="epoch")
    made.model.register_forward_pre_hook(lambda *_: now_ns.__setitem__(0, now_ns[0] + 10_000_000))
    made.train()

    logged, card = made.state.log_history[-1], stepscope.read(tmp_path / "run")
    expected = figures(read_recording(tmp_path / "run"), card.summary)
    names = ["steps", "goodput", "step_time_ms", "tokens_per_second", "samples_per_second"]
    assert [logged[f"stepscope/{name}"] for name in names] == pytest.approx(
        [expected[f"stepscope/{name}"] for name in names], rel=0.02
    )
    assert card.summary.loop.between_ns["evaluation"] > 0


def test_trackers_see_the_figures_with_each_training_log(tmp_path):
    tracker = Tracker()
    made = trainer(
        tmp_path, StepscopeCallback(tmp_path / "run", windows=WINDOWS), eval_strategy="epoch", max_steps=20
    )
    made.callback_handler.callbacks.insert(0, tracker)
    log = Trainer.log
    made.train()

    training = [logs for logs in tracker.logged if "loss" in logs or "train_loss" in logs]
    assert len(training) == 11
    assert all({"stepscope/step_time_ms", "stepscope/tokens_per_second"} <= logs.keys() for logs in training)
    assert [logs["stepscope/steps"] for logs in training][-1] == 20
    others = [logs for logs in tracker.logged if logs not in training]
    assert others and not any("stepscope" in name for logs in others for name in logs)
    assert made.state.log_history[-1]["stepscope/steps"] == 20
    assert Trainer.log is log and current.session is None


def test_of_two_callbacks_one_records(tmp_path, told):
    callbacks = [StepscopeCallback(tmp_path / name, windows=WINDOWS) for name in ("first", "second")]
    trainer(tmp_path, *callbacks).train()

    assert len(read_recording(tmp_path / "first").samples) == 6
    assert not (tmp_path / "second").exists()
    assert ["a second callback" in line for line in told] == [True, False]


@pytest.mark.long
def test_a_callback_that_is_listed_twice_counts_no_step_twice(tmp_path):
    callback = StepscopeCallback(tmp_path / "run", windows=WINDOWS)
    made = trainer(tmp_path, callback, callback)
    made.train()

    recording = read_recording(tmp_path / "run")
    assert [(each.num_tokens, each.num_samples) for each in recording.samples] == [(16, 2)] * 6
    assert made.state.log_history[-1]["stepscope/steps"] == 6
    assert not (tmp_path / "run-2").exists()


@pytest.mark.long
def test_a_resumed_training_is_a_recording_of_its_own(tmp_path):
    callback = StepscopeCallback(tmp_path / "run", windows=WINDOWS)
    trainer(tmp_path, callback, save_strategy="steps", save_steps=4, max_steps=4).train()
    trainer(tmp_path, callback, max_steps=10).train(resume_from_checkpoint=True)

    assert [len(read_recording(tmp_path / name).samples) for name in ("run", "run-2")] == [4, 6]
    assert [read_recording(tmp_path / name).facts["num_planned_steps"] for name in ("run", "run-2")] == [4, 6]
    assert read_recording(tmp_path / "run-2").status == "finished"


def test_a_training_that_fails_in_its_third_step(tmp_path):
    made = trainer(tmp_path, StepscopeCallback(tmp_path / "run", windows=WINDOWS))
    compute_loss, num_calls = made.compute_loss, []

    def fails(*args, **kwargs):
        num_calls.append(1)
        return compute_loss(*args, **kwargs) if len(num_calls) < 3 else 1 / 0

    made.compute_loss = fails
    with pytest.raises(ZeroDivisionError):
        made.train()

    recording = read_recording(tmp_path / "run")
    assert (recording.status, recording.facts["exception"]) == ("failed", "ZeroDivisionError: division by zero")
    assert len(recording.samples) == 2
    assert stepscope.read(tmp_path / "run").summary.num_steps == 2
    assert current.session is None


def test_an_evaluation_alone_leaves_nothing(tmp_path):
    made = trainer(tmp_path, StepscopeCallback(tmp_path / "run"))

    assert made.evaluate()["eval_loss"] > 0
    assert not (tmp_path / "run").exists()


def test_a_training_without_steps(tmp_path):
    trainer(tmp_path, StepscopeCallback(tmp_path / "run"), max_steps=-1, num_train_epochs=0).train()

    recording = read_recording(tmp_path / "run")
    assert (recording.status, recording.samples) == ("finished", ())
    assert stepscope.read(tmp_path / "run").summary.num_steps == 0


@pytest.mark.long
def test_a_copy_or_a_pickle_in_the_middle_of_training_has_no_session(tmp_path):
    callback = StepscopeCallback(tmp_path / "run", windows=WINDOWS)
    copies: list[StepscopeCallback] = []

    def copies_it() -> None:
        torch.save({"callback": callback}, tmp_path / "checkpoint.pt")
        copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])

    trainer(tmp_path, callback, After(3, copies_it)).train()

    copies.append(torch.load(tmp_path / "checkpoint.pt", weights_only=False)["callback"])
    assert len(read_recording(tmp_path / "run").samples) == 6
    assert [each.recording.folder for each in copies] == [None] * 3
    trainer(tmp_path, copies[0]).train()
    assert len(read_recording(tmp_path / "run-2").samples) == 6


@pytest.mark.parametrize(
    "place", ["stepscope.recorder.live.live_metrics", "stepscope.recorder.loop.Loop.explicit_step"]
)
def test_a_fault_of_ours_does_not_stop_training(place, tmp_path, monkeypatch, told):
    expected = trainer(tmp_path).train().training_loss
    monkeypatch.setattr(place, lambda *_args, **_kwargs: 1 / 0)

    assert trainer(tmp_path, StepscopeCallback(tmp_path / "run", windows=WINDOWS)).train().training_loss == expected
    assert "the script goes on" in told[0]
    assert "ZeroDivisionError" in str(read_recording(tmp_path / "run").facts["notes"])


def test_a_folder_that_cannot_be_written_does_not_stop_training(tmp_path, told):
    (tmp_path / "run").write_text("a file")
    made = trainer(tmp_path, StepscopeCallback(tmp_path / "run"))

    assert made.train().global_step == 6
    assert "cannot write to" in told[0]


@pytest.fixture
def deepspeed_forgotten():
    """Transformers keeps the last configuration for the process: models of later tests would ask it."""
    yield
    unset_hf_deepspeed_config()


@pytest.mark.usefixtures("deepspeed_forgotten")
def test_a_deepspeed_configuration_that_cannot_work_fails_in_the_words_of_the_framework(tmp_path):
    def error(*callbacks) -> str:
        # Without the package it is an ImportError, and with it the section that is missing.
        with pytest.raises((ImportError, ValueError)) as info:
            trainer(tmp_path, *callbacks, deepspeed={"train_micro_batch_size_per_gpu": "auto"}).train()
        return str(info.value)

    assert error(StepscopeCallback(tmp_path / "run")) == error()
    assert "deepspeed" in error().lower()
    assert not (tmp_path / "run").exists() and current.session is None
