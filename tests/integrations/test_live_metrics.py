"""The figures of a running recording, against the card of the same recording, on a clock that the loop sets."""

import pytest
import torch
from torch import nn

import stepscope
from stepscope.devices import Ceilings, save_ceilings
from stepscope.recorder import current
from stepscope.recorder.live import live_metrics, metrics, tally
from stepscope.recorder.machine.cpu import cpu_name
from stepscope.recorder.windows import Windows

WINDOWS = Windows(warmup=2, clean=6, trace=1)
BATCH, LENGTH = 2, 5


class Clock:
    """A clock that stands still unless the loop moves it."""

    def __init__(self):
        self.now_ns = 1_000_000_000

    def __call__(self):
        return self.now_ns

    def move(self, ms):
        self.now_ns += round(ms * 1e6)


@pytest.fixture
def clock(recorder_uses):
    clock = Clock()
    recorder_uses(clock)
    return clock


class Model(nn.Module):
    """A model whose forward takes as long as it is told."""

    def __init__(self, clock):
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.clock, self.ms = clock, 10.0

    def forward(self, tokens):
        self.clock.move(self.ms)
        return self.head(self.words(tokens))


def train(clock, folder, num_steps, step_ms=lambda step: 10.0, after=lambda step, model: None, tokens=None):
    """The live figures after the last step, and the card's."""
    model = Model(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.record(folder, model=model, windows=WINDOWS) as recorder:
        session = current.session
        assert live_metrics(session) == {}
        for step in range(num_steps):
            clock.move(2.0)  # what comes before the forward
            model.ms = step_ms(step)
            model(torch.randint(16, (BATCH, LENGTH))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(tokens=tokens(step) if tokens is not None else None)
            after(step, model)
        session.catch_up()
        live = live_metrics(session)
    return {name.removeprefix("stepscope/"): value for name, value in live.items()}, recorder.result.summary


def test_a_steady_loop_has_the_figures_of_its_card(clock, tmp_path):
    ceilings = Ceilings(cpu_name(), {"fp32": 10**9}, 10**9, "2026-01-01T00:00:00Z", "2.13")
    save_ceilings(ceilings)
    metrics._limits.cache_clear()

    live, summary = train(clock, tmp_path / "run", WINDOWS.num_steps + 30)

    assert live["steps"] == summary.num_steps == WINDOWS.num_steps + 30
    assert live["step_time_ms"] == pytest.approx(12.0) == summary.loop.step_ns / 1e6
    assert live["tokens_per_second"] == pytest.approx(BATCH * LENGTH / 0.012) == summary.throughput.per_s
    assert live["samples_per_second"] == pytest.approx(BATCH / 0.012)
    assert live["mfu"] == pytest.approx(summary.mfu.share) == 3 * 2 * BATCH * LENGTH * 8 * 16 / 1e9 / 0.012
    assert live["goodput"] == pytest.approx(summary.loop.goodput)
    memory = stepscope.read(tmp_path / "run").recording.facts["memory"]  # of the end of the clean window
    assert live["timed_peak_memory_gib"] == memory["peak_resident_bytes"] / 2**30


def test_slow_steps_and_warm_up_are_not_training(clock, tmp_path):
    slow = {0: 500.0, 4: 90.0, 9: 300.0, 30: 200.0}  # the first, a clean one, a traced one, a free one

    live, summary = train(clock, tmp_path / "run", 50, step_ms=lambda step: slow.get(step, 10.0))

    assert live["goodput"] == pytest.approx(summary.loop.goodput, rel=1e-9)
    assert 0.3 < live["goodput"] < 0.5


@pytest.mark.long
@pytest.mark.parametrize(("every", "num_steps"), [(10, 49), (10, 50), (25, 50), (50, 50)])
def test_evaluations_between_steps_count_as_in_the_card(clock, tmp_path, every, num_steps):
    def evaluate(step, model):
        if step % every == every - 1:
            model.ms = 60.0
            model.eval()
            with torch.no_grad():
                model(torch.randint(16, (BATCH, LENGTH)))
            model.train()

    live, summary = train(clock, tmp_path / "run", num_steps, after=evaluate)

    assert summary.loop.between_ns["evaluation"] > 1e6
    assert live["goodput"] == pytest.approx(summary.loop.goodput, rel=1e-9)
    assert live["step_time_ms"] == pytest.approx(summary.loop.step_ns / 1e6)
    assert live["tokens_per_second"] == pytest.approx(summary.throughput.per_s)


def test_a_run_of_a_few_steps_has_what_is_known(clock, tmp_path):
    live, summary = train(clock, tmp_path / "run", 3, step_ms=lambda step: 100.0 if not step else 10.0)

    assert live["step_time_ms"] == pytest.approx(12.0) == summary.loop.step_ns / 1e6
    assert live["goodput"] == pytest.approx(summary.loop.goodput)
    assert "mfu" not in live


def test_the_time_follows_a_run_that_becomes_slower_and_memory_stays_bounded(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(tally, "MOST_KEPT", 64)
    monkeypatch.setattr(tally, "RECENT", 20)
    live, summary = train(clock, tmp_path / "run", 300, step_ms=lambda step: 10.0 if step < 275 else 30.0)

    assert live["steps"] == 300 and live["step_time_ms"] == pytest.approx(32.0)
    assert live["goodput"] == pytest.approx(summary.loop.goodput, abs=0.01)


def test_tokens_that_are_given_count(clock, tmp_path):
    live, summary = train(clock, tmp_path / "run", 40, tokens=lambda step: 1200)

    assert live["tokens_per_second"] == pytest.approx(100_000) == summary.throughput.per_s


def test_steps_that_were_joined_or_discarded_are_counted_once():
    found = tally.Tally()
    for window in ("warmup", "clean"):
        found.add(window, 5, {"forward": 5}, (0, 4, 1))
    found.restart()
    found.add("clean", 5, {"forward": 5}, (7, 4, 1))
    found.add("clean", 9, {"backward": 6, "evaluation": 3}, (7, 2, 1))
    found.join(2)

    assert found.num_steps == 1
    assert found.recent() == [(11, 7, 4)]
