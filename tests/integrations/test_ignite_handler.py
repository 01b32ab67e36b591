"""The handler of Ignite's engines."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

pytest.importorskip("ignite")

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from torch import nn

from stepscope.integrations.ignite import StepscopeHandler
from stepscope.recorder import current
from stepscope.recorder.windows import Windows
from stepscope.trace.recording import read_recording

WINDOWS = Windows(warmup=2, clean=20, trace=0, memory=0)
DATA = [(torch.full((3, 4), float(i)), torch.zeros(3, 2)) for i in range(6)]


def engines(**settings: object) -> tuple[Engine, Engine]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, **settings)
    evaluator = create_supervised_evaluator(model)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _engine: evaluator.run(DATA[:2]))
    return trainer, evaluator


def handler(folder: Path) -> StepscopeHandler:
    return StepscopeHandler(folder / "run", windows=WINDOWS)


def test_steps_micro_batches_evaluations_and_figures(tmp_path):
    trainer, evaluator = engines(gradient_accumulation_steps=2)
    handler(tmp_path).attach(trainer, evaluator, every=4)
    seen: list[dict[str, float]] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=4), lambda engine: seen.append(dict(engine.state.metrics))
    )
    trainer.run(DATA, max_epochs=3)

    recording = read_recording(tmp_path / "run")
    assert recording.status == "finished"
    assert [(each.num_samples, each.num_micro_batches) for each in recording.samples] == [(6, 2)] * 9
    assert [each.step for each in recording.samples if "evaluation" in (each.num_times or {})] == [3, 6]
    assert recording.tail.num_times == {"evaluation": 1}
    assert [metrics["stepscope/steps"] for metrics in seen] == [2, 4, 6, 8]
    assert current.session is None


def test_the_figures_after_an_epoch_are_those_of_all_its_steps(tmp_path):
    trainer, _ = engines()
    windows = Windows(warmup=2, clean=1, trace=0, memory=0)
    StepscopeHandler(tmp_path / "run", windows=windows).attach(trainer, every=1000)
    trainer.run(DATA, max_epochs=4)

    assert trainer.state.metrics["stepscope/steps"] == 24  # free running since the fourth


def test_an_evaluator_that_calls_no_model_evaluates(tmp_path):
    trainer, _ = engines()
    evaluator = Engine(lambda _engine, _batch: None)
    handler(tmp_path).attach(trainer, evaluator)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda _engine: evaluator.run(DATA))
    trainer.run(DATA)

    samples = read_recording(tmp_path / "run").samples
    assert [each.step for each in samples if "evaluation" in (each.num_times or {})] == [3]


def test_a_run_that_fails_in_its_third_step(tmp_path):
    trainer, _ = engines()
    handler(tmp_path).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda _engine: 1 / 0)
    handle = Engine._handle_exception
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA)

    recording = read_recording(tmp_path / "run")
    assert (recording.status, len(recording.samples)) == ("failed", 2)
    assert recording.facts["exception"].startswith("ZeroDivisionError")
    assert Engine._handle_exception is handle and current.session is None


def test_an_exception_that_the_script_handles_does_not_end_the_recording(tmp_path):
    trainer, _ = engines()
    handler(tmp_path).attach(trainer)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda _engine, error: None)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda _engine: 1 / 0)
    trainer.run(DATA, max_epochs=2)

    recording = read_recording(tmp_path / "run")
    assert (recording.status, len(recording.samples)) == ("finished", trainer.state.iteration - 1)


def test_runs_that_are_terminated_are_finished(tmp_path):
    trainer, _ = engines()
    handler(tmp_path).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda engine: engine.terminate())
    trainer.run(DATA)
    trainer.run(DATA, max_epochs=1)

    recordings = [read_recording(tmp_path / name) for name in ("run", "run-2")]
    assert [(each.status, len(each.samples)) for each in recordings] == [("finished", 4)] * 2


def test_of_two_handlers_one_records(tmp_path):
    trainer, _ = engines()
    for name in ("first", "second"):
        StepscopeHandler(tmp_path / name, windows=WINDOWS).attach(trainer)
    trainer.run(DATA)

    assert len(read_recording(tmp_path / "first").samples) == 6
    assert not (tmp_path / "second").exists()


def test_a_handler_that_is_attached_twice_records_once(tmp_path):
    trainer, evaluator = engines()
    twice = handler(tmp_path)
    twice.attach(trainer, evaluator)
    twice.attach(trainer, evaluator)
    trainer.run(DATA)

    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    recording = read_recording(tmp_path / "run")
    assert len(recording.samples) == 6 and recording.tail.num_times == {"evaluation": 1}


def test_copies_have_no_session(tmp_path):
    trainer, _ = engines()
    one, copies = handler(tmp_path), []
    one.attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=3),
        lambda _engine: copies.extend([copy.deepcopy(one), pickle.loads(pickle.dumps(one))]),
    )
    trainer.run(DATA)

    assert [each.recording.folder for each in copies] == [None, None]
    assert len(read_recording(tmp_path / "run").samples) == 6
