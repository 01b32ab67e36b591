"""The tracker of Accelerate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from forks import settings
from stepscope.integrations.accelerate import StepscopeTracker
from stepscope.recorder import current
from stepscope.recorder.windows import Windows
from stepscope.trace.recording import read_recording

pytestmark = pytest.mark.filterwarnings("ignore")  # those of accelerate
WINDOWS = Windows(warmup=2, clean=2, trace=0, memory=1)


class Keeps(GeneralTracker):
    """A tracker that keeps what is logged."""

    name = "keeps"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    @property
    def tracker(self):
        return self.logged

    def log(self, values, step=None, **kwargs):
        self.logged.append(values)


@pytest.fixture(autouse=True)
def a_state_of_its_own():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(accelerator: Accelerator, num_epochs: int = 1, folder: Path | None = None, **init: object) -> dict:
    accelerator.init_trackers("project", config={"lr": 0.1}, **init)
    model = nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    values = {}
    for _ in range(num_epochs):
        for (batch,) in data:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                values = {"loss": loss.item()}
                accelerator.log(values)
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
        if folder is not None:
            accelerator.save_state(folder)
    accelerator.end_training()
    return values


def test_steps_phases_and_the_figures_in_every_tracker(tmp_path):
    first, last, log = Keeps(), Keeps(), Accelerator.log
    trackers = [first, StepscopeTracker(tmp_path / "run", windows=WINDOWS), last]
    values = train(Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=trackers), 2, tmp_path / "state")

    recording = read_recording(tmp_path / "run")
    assert recording.status == "finished"
    assert [(each.num_samples, each.num_micro_batches) for each in recording.samples] == [(4, 2)] * 12
    between = [(each.step, set(each.num_times)) for each in recording.samples if each.num_times]
    assert (6, {"evaluation", "checkpoint", "loader_start"}) in between
    assert first.logged == last.logged and len(first.logged) == 12
    assert {"loss", "stepscope/samples_per_second"} <= last.logged[-1].keys()
    assert values.keys() == {"loss"}  # the script's own
    assert Accelerator.log is log and current.session is None


def test_the_name_is_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(Accelerator(cpu=True, log_with="stepscope"), init_kwargs={"stepscope": {"windows": WINDOWS}})

    (run,) = (tmp_path / "runs").iterdir()
    assert len(read_recording(run).samples) == 12


def test_two_trackers_are_one_recording(tmp_path):
    trackers = [StepscopeTracker(tmp_path / name, windows=WINDOWS) for name in ("first", "second")]
    train(Accelerator(cpu=True, log_with=trackers))

    assert len(read_recording(tmp_path / "first").samples) == 12
    assert not (tmp_path / "second").exists()


FAILS = """
import torch
from accelerate import Accelerator
from stepscope.integrations.accelerate import StepscopeTracker

accelerator = Accelerator(cpu=True, log_with=StepscopeTracker("run"))
accelerator.init_trackers("project")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(3):
    if step == 2:
        raise ZeroDivisionError("in the third step")
    accelerator.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
"""


@pytest.mark.long
def test_a_script_that_fails_in_its_third_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FAILS], cwd=tmp_path, env=settings(), capture_output=True, text=True, timeout=100
    )

    recording = read_recording(tmp_path / "run")
    assert done.returncode == 1 and "in the third step" in done.stderr
    assert (recording.status, len(recording.samples)) == ("failed", 2)
    assert recording.facts["exception"] == "ZeroDivisionError: in the third step"
    assert "recorded 2 steps" in done.stderr
