"""What the callbacks of all trainers share: ranks, other recordings, missing packages."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import stepscope
from forks import settings
from stepscope.errors import UsageError
from stepscope.integrations.trainer_recording import RecordingCallback, TrainerRecording
from stepscope.recorder import current, wall
from stepscope.recorder.windows import Windows
from stepscope.trace.recording import read_recording

WINDOWS = Windows(warmup=2, clean=2, trace=0, memory=0)


def train(recording: TrainerRecording, num_steps: int = 3) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording.begin()
    for _ in range(num_steps):
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        recording.step()


def test_a_training_inside_record_adds_to_that_recording(tmp_path):
    recording = TrainerRecording(tmp_path / "inner")
    with stepscope.record(tmp_path / "outer", windows=WINDOWS) as rec:
        train(recording)
        recording.end()
        assert current.session is not None

    assert len(rec.result.recording.samples) == 3
    assert rec.result.recording.facts["steps"]["source"] == "step()"
    assert not (tmp_path / "inner").exists()


def test_a_training_that_never_ended_is_interrupted_when_the_next_begins(tmp_path):
    recording = TrainerRecording(tmp_path / "run", WINDOWS)
    train(recording)
    train(recording, 4)
    recording.end()

    found = [read_recording(tmp_path / name) for name in ("run", "run-2")]
    assert [(each.status, len(each.samples)) for each in found] == [("interrupted", 3), ("finished", 4)]


def test_force_replaces_the_recording(tmp_path):
    for num_steps in (3, 4):
        recording = TrainerRecording(tmp_path / "run", WINDOWS, force=True)
        train(recording, num_steps)
        recording.end()

    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(read_recording(tmp_path / "run").samples) == 4


def test_a_switch_turns_everything_off(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_DISABLE", "1")
    recording = TrainerRecording(tmp_path / "run")
    train(recording)

    assert recording.metrics() == {}
    recording.end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_tokens", [-5, 0, "7"])
def test_tokens_that_cannot_be_are_refused_at_construction(tmp_path, num_tokens):
    for construct in (RecordingCallback, stepscope.record):
        with pytest.raises(UsageError, match=f"tokens_per_step is {num_tokens!r}"):
            construct(tmp_path / "run", tokens_per_step=num_tokens)


@pytest.mark.parametrize("windows", [3, "trace=0", Windows(warmup=1)])
def test_windows_that_cannot_be_are_refused_at_construction(tmp_path, windows):
    with pytest.raises(UsageError, match="windows"):
        RecordingCallback(tmp_path / "run", windows=windows)


def test_a_folder_that_is_no_path_is_refused_at_construction():
    with pytest.raises(UsageError, match="folder is 3"):
        RecordingCallback(3)


def test_a_folder_that_cannot_be_written_is_one_line_without_a_flag(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(wall, "tell", told.append)
    (tmp_path / "run").write_text("a file")
    recording = TrainerRecording(tmp_path / "run")
    train(recording)
    recording.end()

    assert recording.metrics() == {} and current.session is None
    assert len(told) == 1 and str(tmp_path / "run") in told[0] and "name another folder" in told[0]
    assert "-o" not in told[0].split() and "ended" not in told[0]


def test_a_training_without_steps_does_not_advise_to_look_at_it(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(wall, "tell", told.append)
    recording = TrainerRecording(tmp_path / "run", WINDOWS)
    train(recording, 0)
    recording.end()

    assert len(told) == 1 and "no steps" in told[0] and "stepscope show" not in told[0]


def test_tokens_per_step_and_the_line_at_the_end(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(wall, "tell", told.append)
    recording = TrainerRecording(tmp_path / "run", WINDOWS, tokens_per_step=7)
    train(recording)
    assert recording.folder == tmp_path / "run"
    recording.end()

    assert [each.num_tokens for each in read_recording(tmp_path / "run").samples] == [7, 7, 7]
    assert told == [f"recorded 3 steps. To see them, run: stepscope show {tmp_path / 'run'}"]


RANKS = """
import os, sys
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

def rank(index, folders):
    from stepscope.integrations import trainer_recording
    from stepscope.recorder.windows import Windows

    distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=index, world_size=2)
    for num_steps in (3, 4):
        # Only the first rank knows the folder that all are to use.
        folder = folders[0] if index == 0 else None
        recording = trainer_recording.TrainerRecording(folder, Windows(warmup=2, clean=2, trace=0, memory=0))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recording.begin()
        for _ in range(num_steps):
            model(torch.ones(3, 2)).mean().backward()
            optimizer.step()
            recording.step()
        recording.end()
        distributed.barrier()
    distributed.destroy_process_group()

if __name__ == "__main__":
    multiprocessing.start_processes(rank, args=(["run"],), nprocs=2, start_method="fork")
"""


def test_ranks_share_the_folder_that_the_first_has_chosen(forks, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    exit_code, _, error = forks.run(["ranks.py"], tmp_path, {})

    assert exit_code == 0, error
    assert not (tmp_path / "runs").exists()
    for name, num_steps in (("run", 3), ("run-2", 4)):
        for folder in (tmp_path / name, tmp_path / name / "rank1"):
            assert len(read_recording(folder).samples) == num_steps
    assert error.count("recorded") == 2  # the first rank speaks


CHILD = """
import os
import torch
from stepscope.errors import UsageError
from stepscope.integrations.trainer_recording import TrainerRecording

if os.fork():
    os.wait()
else:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = TrainerRecording("alone")
    recording.begin()
    for _ in range(4):
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        recording.step()
    recording.end()
"""


def test_a_child_process_of_stepscope_run_adds_to_its_recording(tmp_path, forks):
    (tmp_path / "train.py").write_text(CHILD)
    exit_code, _, stderr = forks.run(["-m", "stepscope", "run", "-o", "run", "--quiet", "train.py"], tmp_path, {})

    recording = read_recording(tmp_path / "run")
    assert exit_code == 0, stderr
    assert (recording.facts["steps"]["source"], len(recording.samples)) == ("step()", 4)
    assert not (tmp_path / "alone").exists()


@pytest.mark.parametrize(
    ("module", "package", "command"),
    [
        ("huggingface", "transformers", "pip install transformers accelerate"),
        ("accelerate", "accelerate", "pip install accelerate"),
        ("lightning", "lightning", "pip install lightning"),
        ("ignite", "ignite", "pip install pytorch-ignite"),
    ],
)
def test_a_missing_package_is_named_with_its_command(module, package, command, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in (package, "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, name)
    for name in (package, "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"stepscope.integrations.{module}", raising=False)

    with pytest.raises(stepscope.MissingDependencyError) as info:
        __import__(f"stepscope.integrations.{module}")
    assert str(info.value).endswith(f"is not installed: {command}")


def test_importing_one_integration_imports_no_other_package():
    script = "import json, sys, stepscope.integrations.trainer_recording; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], env=settings(), capture_output=True, text=True, check=True)

    heavy = {"torch", "transformers", "accelerate", "lightning", "ignite", "polars"}
    assert not heavy & set(json.loads(done.stdout))
