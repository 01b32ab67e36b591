"""The largest batch: found exactly, with a real limit and with a pretended one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from sweep_runs import ODD, gated, rows_in

from stepscope.errors import UsageError
from stepscope.sweep.grid import Grid
from stepscope.sweep.runner import Options
from stepscope.sweep.tuning.max_batch import MaxBatch, max_batch_point


class Pretended:
    """A runner where batches up to `largest` fit, `odd` statuses happen, and a full run needs `more` room."""

    def __init__(self, largest, more=0, odd=None):
        self.options = Options(memory_limit_bytes=1000)
        self.largest, self.more, self.odd = largest, more, odd or {}
        self.full = []

    def run(self, point, probe=False):
        batch = point.config["batch"]
        if not probe:
            self.full.append(batch)
        fits = batch + (0 if probe else self.more) <= self.largest
        status = self.odd.get(batch, "ok" if fits else "oom")
        return {"status": status, "config": dict(point.config), "hash": point.hash, "peak_allocated_bytes": batch}


def search(runner, first):
    workload = gated()
    (point,) = Grid(workload, {}).points([{"batch": [first]}])
    return MaxBatch(workload, runner, lambda batch, status: None).run(max_batch_point(point, 1000))


@pytest.mark.parametrize("first", [1, 3, 7, 64])
@pytest.mark.parametrize("largest", [1, 2, 6, 7, 8, 37])
def test_it_is_found_exactly_wherever_the_search_begins(first, largest):
    runner = Pretended(largest)

    row = search(runner, first)

    assert row["max_batch"] == largest and row["config"]["batch"] == largest and runner.full == [largest]
    assert len(row["tries"]) <= 2 * 7 and row["max_batch_budget_bytes"] == 1000
    tried = {entry["batch"]: entry["status"] for entry in row["tries"]}
    assert tried[largest] == "ok" and tried[largest + 1] == "oom"


def test_nothing_fits():
    row = search(Pretended(0), 4)
    assert (row["status"], row["max_batch"]) == ("oom", None)
    assert [entry["batch"] for entry in row["tries"]] == [4, 2, 1]


def test_a_full_run_that_needs_more_takes_less():
    row = search(Pretended(8, more=2), 1)
    assert row["max_batch"] == 6


@pytest.mark.parametrize("status", ["crashed", "timeout", "skipped"])
@pytest.mark.parametrize("batch", [1, 8])
def test_any_other_end_of_a_try_is_the_row(status, batch):
    runner = Pretended(9, odd={batch: status})

    row = search(runner, 1)

    assert (row["status"], row["max_batch"], row["config"]["batch"]) == (status, None, batch)
    assert runner.full == [] and row["reason"].startswith(f"batch {batch}: ")


def test_stepping_down_from_a_large_batch_takes_few_runs():
    runner = Pretended(100_000, more=10_000)

    row = search(runner, 1)

    assert 85_000 < row["max_batch"] <= 90_000 and len(runner.full) < 10


def test_a_workload_without_a_batch_is_refused():
    with pytest.raises(UsageError, match="needs a knob 'batch'"):
        max_batch_point(SimpleNamespace(config={}, workload="x"), None)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_with_a_real_limit(bench, tmp_path):
    words = ("--mode", "forward+backward", "--device", "cpu", "--steps", "1", "--max-batch", "400MiB")
    code, out, err = bench(f"{ODD}:HUNGRY", *words, "-o", "sweep")

    assert code == 0, out + err
    (row,) = rows_in(tmp_path / "sweep")
    # The traced pass takes a gigabyte that no step could have: the limit is for steps.
    assert row["proofs"] == {"eager": "aten::pow ×2"}
    # Three tensors of 8 MiB an item live at once, at least, and the process needs some for itself.
    assert 4 <= row["max_batch"] <= 16
    assert row["config"]["batch"] == row["max_batch"] and row["status"] == "ok"
    assert {entry["status"] for entry in row["tries"]} == {"ok", "oom"}
    refused = next(entry for entry in row["tries"] if entry["status"] == "oom")
    assert refused["oom"]["asked_bytes"] >= 8 << 20
    assert "max batch" in out
