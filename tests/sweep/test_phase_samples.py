"""Phases of every pass in a row, and passes without an optimizer under `stepscope run`."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

pytest.importorskip("torch")

from stepscope.sweep import measure
from stepscope.sweep.grid import Grid
from stepscope.sweep.record_runs import record_point
from stepscope.trace.memory_file import read_memory
from stepscope.workloads.registry import find


def test_every_phase_of_every_pass_has_a_time(monkeypatch):
    ticks = iter([0, 10, 30, 60, 100, 105, 110, 120])
    monkeypatch.setattr(measure, "_now", lambda device: next(ticks))
    phases = measure.Phases("cpu")

    def a_pass(mark):
        for name in ("forward", "backward", "optimizer"):
            mark(name)
        return "loss"

    assert phases.run(a_pass) == "loss"
    assert phases.medians_ms(a_pass, 1) == {"forward_ms": 5e-6, "backward_ms": 5e-6, "optimizer_ms": 1e-5}
    assert phases.samples_ns == {"forward": [10, 5], "backward": [20, 5], "optimizer": [30, 10]}


@pytest.mark.long
def test_a_row_has_the_first_call_the_warm_up_and_the_samples_in_order(tmp_path):
    from stepscope.sweep.results import Results
    from stepscope.sweep.runner import Options, Runner
    from stepscope.sweep.server import Server, default_start

    workload = find("cs336")
    axes = {"preset": ["tiny"], "layers": [1], "seq_len": [8], "mode": ["step"], "warmup": [3], "steps": [2]}
    point = Grid(workload, {"device": "cpu"}).points([axes])[0]
    with Server(default_start()) as server, Results(tmp_path / "out", {}, False, "") as results:
        row = Runner(workload, server, results, Options(timeout_s=120.0)).run(point)

    samples = row["samples_phase_ns"]
    assert row["status"] == "ok" and {name: len(values) for name, values in samples.items()} == {
        "forward": 5, "backward": 5, "optimizer": 5,
    }  # fmt: skip
    passes = [sum(times) for times in zip(*samples.values())]
    warm = [row["first_call_ns"], *row["samples_warmup_ns"]]
    assert all(marked <= whole for marked, whole in zip(passes, warm))
    for name, values in samples.items():
        assert row["facts"][f"{name}_ms"] == pytest.approx(statistics.median(values[-2:]) / 1e6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "stages"), [("inference", {"forward"}), ("forward+backward", {"forward", "backward"})]
)
def test_a_loop_without_an_optimizer_says_where_its_steps_end(tmp_path, mode, stages):
    """Else a step would begin inside inference_mode, whose end undoes what watches the tensors."""
    axes = {"preset": ["tiny"], "layers": [1], "seq_len": [8], "mode": [mode]}
    point = Grid(find("cs336"), {"device": "cpu"}).points([axes])[0]
    (tmp_path / "logs").mkdir()
    row = record_point(point, tmp_path, ("--warmup", "2", "--clean", "1", "--trace", "0"), 120.0)

    assert row["status"] == "ok"
    memory = read_memory(tmp_path / row["recording"] / "memory.json.gz")
    assert stages <= {stage["name"] for stage in memory["stages"]}
    assert any(each["op"] == "aten.bmm" and each["phase"] == "forward" for each in memory["allocations"])
    events = [stage["event"] for stage in memory["stages"]]
    assert all(before <= after for before, after in pairwise(events))
