"""The callback of Lightning's Trainer."""

from __future__ import annotations

import copy
import csv
import pickle
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stepscope
from stepscope.integrations.lightning import StepscopeCallback
from stepscope.recorder import current
from stepscope.recorder.windows import Windows
from stepscope.trace.recording import read_recording

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Lightning
WINDOWS = Windows(warmup=2, clean=2, trace=0, memory=1)


class Classifier(L.LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.fails_at = fails_at

    def training_step(self, batch, index):
        if index == self.fails_at:
            raise ZeroDivisionError
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _index):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Alternating(Classifier):
    """Two updates per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 2)

    def training_step(self, batch, index):
        for optimizer, net in zip(self.optimizers(), (self.net, self.other)):
            optimizer.zero_grad()
            self.manual_backward(net(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]


def trainer(folder: Path, *callbacks: L.Callback, **settings: object) -> L.Trainer:
    given = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | settings
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **given,
    )


def loaders() -> tuple[DataLoader, DataLoader]:
    data = TensorDataset(torch.zeros(24, 4), torch.zeros(24, dtype=torch.long))
    return DataLoader(data, batch_size=2), DataLoader(data, batch_size=12)


def test_steps_micro_batches_and_phases(tmp_path):
    callback = StepscopeCallback(tmp_path / "run", windows=WINDOWS)
    trainer(tmp_path, callback, accumulate_grad_batches=3, enable_checkpointing=True).fit(Classifier(), *loaders())

    recording = read_recording(tmp_path / "run")
    assert (recording.status, recording.facts["steps"]["source"]) == ("finished", "step()")
    assert [(each.num_samples, each.num_micro_batches) for each in recording.samples] == [(6, 3)] * 8
    assert recording.facts["num_planned_steps"] == 8
    assert [each.step for each in recording.samples if "evaluation" in (each.num_times or {})] == [4]
    assert recording.tail.num_times == {"evaluation": 1, "checkpoint": 1, "logging": 1}


def test_the_loggers_get_the_figures(tmp_path):
    logger = CSVLogger(tmp_path, version="log")
    callback = StepscopeCallback(tmp_path / "run", windows=Windows(clean=30, memory=0))
    trainer(tmp_path, callback, logger=logger, log_every_n_steps=4).fit(Classifier(), *loaders())

    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    logged = [row for row in rows if row.get("stepscope/samples_per_second")]
    assert [int(row["step"]) for row in logged] == [3, 7, 11, 15, 19, 23, 24]
    assert float(logged[-1]["stepscope/steps"]) == 24


def test_the_last_figures_are_those_of_all_steps(tmp_path):
    logger = CSVLogger(tmp_path, version="log")
    callback = StepscopeCallback(tmp_path / "run", windows=Windows(warmup=2, clean=2, trace=0, memory=0))
    trainer(tmp_path, callback, logger=logger, log_every_n_steps=50).fit(Classifier(), *loaders())

    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert [row["stepscope/steps"] for row in rows if row.get("stepscope/steps")] == ["24"]


def test_the_last_figures_include_the_validation_at_the_end(tmp_path, recorder_uses):
    now_ns = [1_000_000_000]  # a clock that only forwards move
    recorder_uses(lambda: now_ns[0])
    model, logger = Classifier(), CSVLogger(tmp_path, version="log")
    model.net.register_forward_pre_hook(lambda *_: now_ns.__setitem__(0, now_ns[0] + 10_000_000))
    callback = StepscopeCallback(tmp_path / "run", windows=Windows(warmup=2, clean=2, trace=0, memory=0))
    trainer(tmp_path, callback, logger=logger, log_every_n_steps=50, max_epochs=1).fit(model, *loaders())

    (logged,) = [
        row for row in csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()) if row["stepscope/steps"]
    ]
    loop = stepscope.read(tmp_path / "run").summary.loop
    assert loop.between_ns["evaluation"] == pytest.approx(20e6 / 12)
    assert float(logged["stepscope/step_time_ms"]) == pytest.approx(loop.step_ns / 1e6, rel=0.02)
    assert float(logged["stepscope/goodput"]) == pytest.approx(loop.goodput, rel=0.02)


def test_a_validation_that_calls_no_model_is_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(Classifier, "validation_step", lambda *_args: None)
    trainer(tmp_path, StepscopeCallback(tmp_path / "run", windows=WINDOWS)).fit(Classifier(), *loaders())

    samples = read_recording(tmp_path / "run").samples
    assert [each.step for each in samples if "evaluation" in (each.num_times or {})] == [12]


def test_two_optimizers_make_one_step(tmp_path):
    trainer(tmp_path, StepscopeCallback(tmp_path / "run", windows=WINDOWS)).fit(Alternating(), loaders()[0])

    samples = read_recording(tmp_path / "run").samples
    assert [(each.num_samples, each.num_micro_batches) for each in samples] == [(2, 1)] * 24  # the first one too


def test_a_training_that_fails_in_its_third_step(tmp_path):
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, StepscopeCallback(tmp_path / "run", windows=WINDOWS)).fit(Classifier(2), loaders()[0])

    recording = read_recording(tmp_path / "run")
    assert (recording.status, len(recording.samples)) == ("failed", 2)
    assert recording.facts["exception"].startswith("ZeroDivisionError")
    assert current.session is None


@pytest.mark.long
def test_a_resumed_training_goes_into_a_folder_of_its_own(tmp_path):
    callback = StepscopeCallback(tmp_path / "run", windows=WINDOWS)
    first = trainer(tmp_path, callback, max_epochs=1)
    first.fit(Classifier(), loaders()[0])
    first.save_checkpoint(tmp_path / "last.ckpt")
    trainer(tmp_path, callback).fit(Classifier(), loaders()[0], ckpt_path=tmp_path / "last.ckpt")

    assert [len(read_recording(tmp_path / name).samples) for name in ("run", "run-2")] == [12, 12]


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_without_training_there_is_no_recording(verb, tmp_path):
    model = Classifier()
    model.predict_step = lambda batch, *_: model.net(batch[0])
    getattr(trainer(tmp_path, StepscopeCallback(tmp_path / "run")), verb)(model, loaders()[1])

    assert not (tmp_path / "run").exists()


def test_a_training_without_steps(tmp_path):
    trainer(tmp_path, StepscopeCallback(tmp_path / "run"), max_steps=0).fit(Classifier(), *loaders())

    assert not (tmp_path / "run").exists()
    assert current.session is None


def test_a_fault_of_ours_does_not_stop_training(tmp_path, monkeypatch):
    monkeypatch.setattr(Classifier, "log_dict", lambda *_args, **_kwargs: 1 / 0)
    made = trainer(tmp_path, StepscopeCallback(tmp_path / "run", windows=WINDOWS), log_every_n_steps=5)
    made.fit(Classifier(), loaders()[0])

    recording = read_recording(tmp_path / "run")
    assert made.global_step == 24
    assert (recording.status, len(recording.samples)) == ("finished", 5)
    assert "ZeroDivisionError" in str(recording.facts["notes"])


def test_copies_have_no_session(tmp_path):
    copies: list[StepscopeCallback] = []

    class Copies(L.Callback):
        def on_train_batch_start(self, trainer, *_args):
            copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])

    callback = StepscopeCallback(tmp_path / "run", windows=WINDOWS)
    trainer(tmp_path, callback, Copies(), max_steps=3).fit(Classifier(), loaders()[0])

    assert [each.recording.folder for each in copies] == [None] * 6
    assert len(read_recording(tmp_path / "run").samples) == 3
