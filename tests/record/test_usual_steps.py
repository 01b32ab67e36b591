"""Steps that are noted and interpreted later are recorded as those that are interpreted at once."""

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parametrized import parametrized

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stepscope
from stepscope.recorder.session import Session
from stepscope.recorder.usual import steps as usual_steps
from stepscope.recorder.usual.notes import Notes, PythonNotes
from stepscope.recorder.usual.steps import UsualSteps
from stepscope.recorder.windows import Windows

NUM_STEPS = 16


def _collect_garbage() -> None:
    """Do what the interpreter does before and after a full collection, without the collection."""
    for phase in ("start", "stop"):
        for callback in list(gc.callbacks):
            callback(phase, {"generation": 2, "collected": 0, "uncollectable": 0})


class Collects(torch.autograd.Function):
    """Collects garbage in the forward and in the backward."""

    @staticmethod
    def forward(ctx, given):
        _collect_garbage()
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        _collect_garbage()
        return gradient


class Model(nn.Module):
    def __init__(self, collects: bool = False) -> None:
        super().__init__()
        self.collects = collects
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, given: Any, num: int = 0) -> Any:
        out = self.inner(given)
        return Collects.apply(out) if self.collects else out


class Training:
    """A model, an optimizer, and what a loop does with them in one step."""

    def __init__(self, collects: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Model(collects)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.losses: list[float] = []
        self.other = nn.Linear(8, 8)
        self.batches: Any = None

    def backward(self, batch: Any) -> None:
        loss = self.model(batch).square().mean()
        loss.backward()
        self.losses.append(loss.item())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _batch(step: int) -> Any:
    return torch.full((4 + step % 3, 8), float(step))


def plain(step: int, training: Training) -> None:
    training.backward(_batch(step))
    training.update()


def accumulates(step: int, training: Training) -> None:
    for part in range(3):
        training.backward(_batch(step + part))
    training.update()


def same_batch_twice(step: int, training: Training) -> None:
    batch = _batch(step)
    training.backward(batch)
    training.backward(batch.view_as(batch))
    training.update()


def without_backward(step: int, training: Training) -> None:
    training.model(_batch(step))
    training.backward(_batch(step + 1))
    training.update()


def evaluates(step: int, training: Training) -> None:
    if step % 5 == 4:
        training.model.eval()
        with torch.no_grad():
            training.model(_batch(step))
        training.model.train()
    plain(step, training)


def two_losses(step: int, training: Training) -> None:
    loss = training.model(_batch(step)).square()
    loss.mean().backward(retain_graph=True)
    loss.sum().backward()
    training.update()


def skips_updates(step: int, training: Training) -> None:
    training.backward(_batch(step))
    if step % 2:
        training.update()


def fails_in_the_optimizer(step: int, training: Training) -> None:
    training.backward(_batch(step))
    if step % 7 == 3:
        with pytest.raises(ZeroDivisionError):
            training.optimizer.step(lambda: 1 / 0)
    training.update()


def closure(step: int, training: Training) -> None:
    batch = _batch(step)
    training.optimizer.step(lambda: training.backward(batch))
    training.optimizer.zero_grad()


def epochs_of_two(step: int, training: Training) -> None:
    if step % 2 == 0:
        training.batches = iter(DataLoader(TensorDataset(torch.zeros(8, 8)), batch_size=4))
    training.backward(next(training.batches)[0])
    training.update()


def two_models(step: int, training: Training) -> None:
    batch = _batch(step)
    training.backward(batch)
    training.other(batch).mean().backward()
    training.update()


LOOPS = (
    *(plain, accumulates, same_batch_twice, without_backward, evaluates, two_losses, skips_updates),
    *(fails_in_the_optimizer, closure, epochs_of_two, two_models),
)


@pytest.fixture(autouse=True)
def collects_only_when_told():
    """A collection of Python's own, noted with the step it falls into, would be in one recording only."""
    gc.disable()
    yield
    gc.enable()


def _record(
    folder: Path, do: Callable[[int, Training], None], windows: Windows, collects: bool, calls_step: bool = False
) -> list[Any]:
    folder.mkdir()
    training = Training(collects)
    session = Session(folder, windows=windows, facts={})
    session.start()
    for step in range(NUM_STEPS):
        do(step, training)
        if calls_step:
            session.explicit_step()
    session.close("finished")
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def _facts(lines: list[Any]) -> list[Any]:
    """What must be equal: everything but times."""
    kept = []
    for line in lines:
        if "window" not in line:
            kept.append(line)
            continue
        assert sum(line["host_ns"].values()) == line["wall_ns"]
        times = {"start_ns", "wall_ns", "host_ns"}
        kept.append({key: value for key, value in line.items() if key not in times})
        kept.append({name for name in line["host_ns"] if name != "other"})
    return kept


@parametrized(
    ("calls_step", "window"),
    [
        pytest.param(False, "free", id="optimizer-free"),
        pytest.param(True, "clean", id="step()-clean"),
        pytest.param(False, "clean", id="optimizer-clean", marks=pytest.mark.long),
        pytest.param(True, "free", id="step()-free", marks=pytest.mark.long),
    ],
    quick=14,
)
@pytest.mark.parametrize(
    ("do", "collects"),
    [*((do, False) for do in LOOPS), (plain, True), (accumulates, True), (closure, True)],
    ids=lambda value: getattr(value, "__name__", "collects_garbage" if value else ""),
)
def test_usual_steps_are_recorded_as_any_others(do, collects, calls_step, window, tmp_path, monkeypatch):
    windows = Windows(warmup=2, clean=1 if window == "free" else NUM_STEPS, trace=0, memory=0)
    cheap = _record(tmp_path / "cheap", do, windows, collects, calls_step)
    monkeypatch.setattr(UsualSteps, "start", lambda *_args: None)
    long = _record(tmp_path / "long", do, windows, collects, calls_step)

    assert _facts(cheap) == _facts(long)


def test_steps_that_the_script_ends_take_the_cheap_way_too(tmp_path, monkeypatch):
    noted: list[bool] = []
    explicit_step = UsualSteps.explicit_step
    monkeypatch.setattr(UsualSteps, "explicit_step", lambda usual: noted.append(explicit_step(usual)) or noted[-1])
    lines = _record(tmp_path / "x", plain, Windows(warmup=2, clean=3, trace=0, memory=0), False, calls_step=True)

    assert sum(noted) >= NUM_STEPS - 4
    assert len({line["step"] for line in lines if "window" in line}) == NUM_STEPS


def test_time_between_two_usual_steps_belongs_to_one_of_them(tmp_path, monkeypatch):
    loader = iter(DataLoader(TensorDataset(torch.zeros(NUM_STEPS * 4, 8)), batch_size=4))

    def from_loader(_step: int, training: Training) -> None:
        training.backward(next(loader)[0])
        training.update()

    windows = Windows(warmup=2, clean=1, trace=0, memory=0)
    lines = _record(tmp_path / "cheap", from_loader, windows, collects=False)
    free = [line for line in lines if line.get("window") == "free"]

    assert len(free) == NUM_STEPS - 3
    assert all(line["num_samples"] == 4 and "data" in line["host_ns"] for line in free)
    # Nothing is interpreted before 250 ms have passed or the loop ends: these steps follow each other without a gap.
    ends = [line["start_ns"] + line["wall_ns"] for line in free]
    assert sum(end == line["start_ns"] for end, line in zip(ends, free[1:])) > len(free) / 2


def test_a_usual_step_calls_one_function_of_ours_per_hook(tmp_path, monkeypatch):
    monkeypatch.setattr(usual_steps, "INTERPRET_NS", 10**18)  # what is done every quarter of a second is not counted
    ours, called = str(Path(stepscope.__file__).parent), Counter[str]()

    def profile(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            called[frame.f_code.co_name] += 1

    loader = iter(DataLoader(TensorDataset(torch.zeros(NUM_STEPS * 4, 8)), batch_size=4))

    def from_loader(step: int, training: Training) -> None:
        sys.setprofile(profile if step >= NUM_STEPS - 2 else None)
        batch = next(loader)[0]
        training.model(given=batch, num=1).square().mean().backward()
        training.update()
        sys.setprofile(None)

    _record(tmp_path / "x", from_loader, Windows(warmup=2, clean=1, trace=0, memory=0), collects=False)

    if Notes is not PythonNotes:
        once = ("fetch", "backward", "begins", "ended")
        assert called == {**dict.fromkeys(once, 2), "__call__": 4}  # of the model, and of the network in it
    else:
        assert called.total() <= 2 * 30
