"""Two whole runs compared: throughput, goodput, losses against step and against time, and where each changes."""

import json
import random
from dataclasses import replace

import pytest

from history_maker import Run, write_history
from stepscope.analysis.comparison.whole_runs import WholeRuns, compare_runs
from stepscope.analysis.run.goodput import goodput
from stepscope.analysis.run.series import Track
from stepscope.document.comparison import comparison_document
from stepscope.document.model import Table
from stepscope.document.whole_run_comparison import whole_run_parts
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.compare import compare
from stepscope.session.history import load
from stepscope.session.run import run_of


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    slow = {"slower": lambda step: 1.5 if step >= 1200 else 1.0, "save_every": 100}
    base = open_session(write_history(folder / "base", Run(num_steps=2_000)))
    new = open_session(write_history(folder / "new", Run(num_steps=2_000, **slow)))
    return compare([base], [new])


@pytest.fixture(scope="module")
def runs(compared) -> WholeRuns:
    assert compared.runs is not None
    return compared.runs


def test_figures_since_the_start(runs):
    assert (runs.base.num_steps, runs.new.num_steps) == (2_000, 2_000)
    assert runs.base.wall_ns == pytest.approx(220e9, rel=0.01)  # 20 s of start-up, 100 ms per step
    saved, slower = 20 * 3e9, 800 * 0.5 * 95e6
    assert runs.new.wall_ns == pytest.approx(220e9 + saved + slower, rel=0.02)
    assert runs.base.unit == "tokens" and runs.base.per_s == pytest.approx(2_000 * 8192 / 220, rel=0.01)
    assert runs.new.rows["checkpoint"] == 60_000_000_000 and runs.base.goodput > runs.new.goodput


def test_where_each_changes(runs):
    assert runs.base.changes == ()
    (change,) = runs.new.changes
    assert change.kind == "step" and change.step == pytest.approx(1200, abs=30) and ":" in change.time_of_day


def test_losses_are_equal_at_a_step_and_later_in_time(runs):
    assert len(runs.loss_by_step) == len(runs.loss_by_time) == 10
    assert all(point.new == pytest.approx(point.base, rel=0.02) for point in runs.loss_by_step)
    assert all(point.new > point.base for point in runs.loss_by_time)
    assert runs.loss_by_time[-1].at <= 220


def falling(step: int) -> float:
    return 0.999**step + 100 / (step + 1) ** 2


def sampled_at(tmp_path, *every_steps: range) -> WholeRuns:
    """One trajectory, of which two runs sampled different steps."""
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=2_000))))
    base, new = (
        replace(run, tracks={"loss": Track(steps, [step * 10**8 for step in steps], [*map(falling, steps)])})
        for steps in every_steps
    )
    return compare_runs(base, goodput(base), new, goodput(new))


def test_only_losses_of_the_same_steps_are_compared(tmp_path):
    runs = sampled_at(tmp_path, range(29, 2_000, 240), range(29, 2_000, 180))
    assert 0 < len(runs.loss_by_step) < 10
    assert any(point.noise == 0 for point in runs.loss_by_step)
    for point in runs.loss_by_step:
        assert point.new == pytest.approx(point.base, rel=0.02) == pytest.approx(falling(int(point.at)), rel=0.02)


def test_equal_steps_are_preferred(tmp_path):
    runs = sampled_at(tmp_path, range(100, 2_000, 5), range(100, 2_000, 7))
    assert len(runs.loss_by_step) == 10
    assert all(point.new == point.base for point in runs.loss_by_step)


def test_losses_of_other_batches_differ_by_noise(tmp_path):
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=2_000))))
    noisy = [2 + random.Random(step).gauss(0, 0.3) for step in range(2_000)]  # one trajectory, other steps of it
    steps = range(100, 2_000, 10), range(103, 2_000, 10)
    sides = [
        replace(run, tracks={"loss": Track(some, [step * 10**8 for step in some], [noisy[step] for step in some])})
        for some in steps
    ]
    compared = compare_runs(sides[0], goodput(sides[0]), sides[1], goodput(sides[1]))
    points = compared.loss_by_step
    assert len(points) >= 9 and all(point.noise > 0 for point in points)
    assert sum(abs(point.new - point.base) > point.noise for point in points) <= 1
    tables = [part for part in whole_run_parts(compared) if isinstance(part, Table)]
    (table,) = (part for part in tables if part.id == "loss_by_step")
    assert "within noise" in table.columns["change"]


def test_losses_of_other_steps_are_not_compared_at_all(tmp_path):
    runs = sampled_at(tmp_path, range(100, 1_000, 100), range(150, 1_000, 100))
    assert runs.have_losses and runs.loss_by_step == ()
    tables = [part.id for part in whole_run_parts(runs) if isinstance(part, Table)]
    assert "loss_by_step" not in tables and "whole_runs" in tables


def test_a_damaged_history_is_named(tmp_path):
    sessions = []
    for name in ("base", "new"):
        file = write_history(tmp_path / name, Run(num_steps=200)) / "history.jsonl"
        lines = file.read_text().splitlines()
        if name == "new":
            lines[5:8] = ["{", "nonsense", '{"step":']
        file.write_text("\n".join(lines) + "\n")
        sessions.append(open_session(file.parent))
    told = json.dumps(compare(sessions[:1], sessions[1:]).to_json()["pairs"][0]["notes"])
    assert "new: history.jsonl: 3 lines" in told and "base: history.jsonl" not in told


def test_the_document_and_json_have_them(compared):
    text = terminal_text(comparison_document(compared), width=100)
    assert "tokens per second" in text and "Loss against time" in text and "slower" in text
    told = compared.to_json()["runs"]
    assert told["new"]["changes"][0]["step"] == pytest.approx(1200, abs=30)


def test_recordings_without_a_history_have_no_whole_runs(tmp_path):
    from handmade import cpu_facts, sample, write_recording

    for name in ("a", "b"):
        write_recording(tmp_path / name, cpu_facts(trace=None), [sample(step) for step in range(8)])
    assert compare([open_session(tmp_path / "a")], [open_session(tmp_path / "b")]).runs is None
