"""A day of training: memory stays flat, and the recording's size is bounded."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from stepscope.recorder import files
from stepscope.recorder.session import Session
from stepscope.recorder.windows import Windows

INPUT = torch.ones(1, 2)
MAX_BYTES_PER_STEP = 400


def trains() -> Callable[[], None]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(INPUT).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def takes_turns() -> Callable[[], None]:
    steps = [trains(), trains()]
    return lambda: [step() for step in steps] and None


def evaluates() -> Callable[[], None]:
    model, step = nn.Linear(2, 2).eval(), trains()

    def both() -> None:
        with torch.no_grad():
            model(INPUT)
        step()

    return both


def infers() -> Callable[[], None]:
    model = nn.Linear(2, 2)

    def step() -> None:
        with torch.no_grad():
            model(INPUT)

    return step


def trains_new_models() -> Callable[[], None]:
    def steps() -> None:
        step = trains()
        for _ in range(3):
            step()

    return steps


LOOPS = (trains, takes_turns, evaluates, infers, trains_new_models)


def _record(folder: Path, loop: Callable[[], Callable[[], None]], num_times: int) -> list[int]:
    """Return how many blocks of memory Python has after a third, two thirds and all of a loop."""
    gc.collect()
    gc.freeze()
    step = loop()
    session = Session(folder, windows=Windows(warmup=2, clean=2, trace=0, memory=1), facts={})
    session.start()
    blocks = []
    for _ in range(3):
        for _ in range(num_times // 3):
            step()
        session.catch_up()
        session._samples.digest(waits=True)
        session._samples.flush()  # lines of the last quarter of a second
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    session.close("finished")
    gc.unfreeze()
    return blocks


@pytest.mark.long
@pytest.mark.parametrize("loop", [trains, infers, trains_new_models])
def test_memory_is_flat(loop, tmp_path):
    _, before, after = _record(tmp_path, loop, 600)
    assert after - before < 100  # 200 times: less than one block for two


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loop", LOOPS)
def test_memory_is_flat_for_long(loop, tmp_path):
    _, before, after = _record(tmp_path, loop, 30_000 if loop is trains_new_models else 150_000)
    assert after - before < 200
    assert (tmp_path / files.SAMPLES_FILE).stat().st_size < MAX_BYTES_PER_STEP * files.MAX_SAMPLE_LINES


def test_steps_after_the_limit_cost_no_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_SAMPLE_LINES", 200)
    _record(tmp_path, trains, 900)
    # Lines are written together: the last of them may pass the limit.
    lines = (tmp_path / files.SAMPLES_FILE).read_text().splitlines()
    assert 200 <= len(lines) < 900
    assert max(map(len, lines)) < MAX_BYTES_PER_STEP
