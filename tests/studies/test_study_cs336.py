"""The study of the plain transformer: measured once on a CPU; all it promises; sentences that follow the data."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quick_study import canned, changed, first_text
from stepscope.document.model import Missing, Table, Text
from stepscope.errors import Unavailable
from stepscope.studies.cs336 import precision as cs336_precision
from stepscope.studies.cs336.attention import compiled, grid, squares
from stepscope.studies.cs336.kernels import kernels, products, softmax
from stepscope.studies.cs336.memory import alive, autocast, peaks
from stepscope.studies.cs336.precision import exactness, mixed_precision
from stepscope.studies.cs336.study import STUDY
from stepscope.studies.cs336.time import durations, warm_up
from stepscope.studies.stored import Stored

ANSWERS = (durations, warm_up, kernels, products, softmax, mixed_precision, exactness, peaks, alive, autocast, grid,
           squares, compiled)  # fmt: skip
GPU_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "h200" / "gpt2_eager.json.gz"


def first(answer, folder):
    return first_text(answer, Stored(folder))


def altered(studied, tmp_path, measure, change):
    """A copy of the study whose rows of a measure are changed in place."""
    return changed(studied, tmp_path / "copy", measure, change).folder


def test_every_file_it_promises_is_there_and_says_something(studied):
    for name in STUDY.files:
        assert (studied / name).stat().st_size > 100, name
    for name in (studied / name for name in STUDY.files if name.endswith(".csv")):
        assert len(list(csv.reader(name.read_text().splitlines()))) > 1, name


def test_every_question_is_answered_and_no_column_is_empty(report):
    assert [part.text for part in report.parts(Missing)] == ["Not measured: no model was compiled: --full does"]
    assert len({section.id for section in report.sections}) == len(STUDY.questions) + 2
    for table in report.parts(Table):
        assert table.num_rows, table.id
        for name, values in table.columns.items():
            assert any(value is not None for value in values), f"{table.id}: {name}"


def test_no_sentence_is_canned(stored, tmp_path):
    assert canned(STUDY, stored, tmp_path / "other") == []


def test_what_does_not_fit_is_a_row(studied, report):
    table = next(part for part in report.parts(Table) if part.id == "durations")
    assert "oom" in table.columns["status"] and "Out of memory here: tiny 524288" in first(durations, studied)


def test_the_report_is_made_again_from_what_is_stored(studied):
    before = (studied / "cs336_report.md").read_text()
    done = subprocess.run([sys.executable, "-m", "stepscope", "report", str(studied)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (studied / "cs336_report.md").read_text() == before


def test_the_time_of_a_step_is_that_of_its_passes(studied, tmp_path):
    """GIVEN a backward of 5 s in every pass THEN it is nearly all of a step, whose mean is above 5 s."""

    def change(row):
        for values in [(row.get("samples_phase_ns") or {}).get("backward", [])]:
            values[:] = [5_000_000_000] * len(values)

    text = first(durations, altered(studied, tmp_path, "models", change))
    assert "takes 5." in text and "backward 9" in text


def test_a_slow_first_call_is_seen_without_warm_up_only(studied, tmp_path):
    """GIVEN steps of 3 ms after a first one of 1 s THEN the mean of five is 202.4 ms, and one is warm-up enough."""

    def change(row):
        for values in (row.get("samples_phase_ns") or {}).values():
            values[:] = [1_000_000_000 // len(row["samples_phase_ns"]), *([1_000_000] * (len(values) - 1))]

    text = first(warm_up, altered(studied, tmp_path, "models", change))
    assert "67.47 times the 3.00 ms" in text and "within 10 % of that: 1." in text


def test_a_point_whose_process_had_run_the_check_is_not_cold(studied, tmp_path):
    """Of two lengths the first has run the gate for both: the means without warm-up are those of the second."""
    assert "Step of tiny 96: " in first(warm_up, studied)

    def change(row):
        row["gate"] = {**(row["gate"] or {}), "run_by": "another"}

    assert "Step of tiny 48: " in first(warm_up, altered(studied, tmp_path, "models", change))


def test_the_work_of_the_gpu_is_told_apart_from_the_pace_of_the_host(studied, tmp_path, monkeypatch):
    """GIVEN steps of 10 ms of which the GPU works 6 ms in fp32 and 2 ms in bf16 THEN that is 3 times as fast."""
    work_ns = {"fp32": 2_000_000, "autocast_bf16": 666_667}
    monkeypatch.setattr(
        cs336_precision, "gpu_work_ns",
        lambda _, record: dict.fromkeys(("forward", "backward", "optimizer"), work_ns[record["dtype"]]),
    )  # fmt: skip

    def change(row):
        if row["status"] == "ok" and row["run"]["mode"] == "step":
            row["samples_device_ns"] = [10_000_000] * len(row["samples_device_ns"])
            row["gpu_busy_ns"] = 3 * work_ns[row["run"]["dtype"]]

    text = first(mixed_precision, altered(studied, tmp_path, "models", change))
    assert (
        "in the step 3.00 (tiny 48) to 3.00 (tiny 48) times the speed of fp32. It is slower in 0 of 3 passes." in text
    )
    assert "In that of tiny 48 the host sets the pace, and the clock says 1.00." in text


def test_autocast_is_as_fast_as_its_samples_say(studied, tmp_path):
    def change(row):
        if row["run"]["dtype"] == "autocast_bf16" and row["status"] == "ok":
            row["samples_device_ns"] = [1000] * len(row["samples_device_ns"])
            row["facts"] |= dict.fromkeys(row["facts"], 0.001)

    assert "autocast is slower in 0 of 3 passes" in first(
        mixed_precision, altered(studied, tmp_path, "models", change)
    )


def test_peaks_and_einsum_follow_the_rows(studied, tmp_path):
    assert " in fp32; with functional.linear" in first(autocast, studied)
    assert ": the same." in first(autocast, studied)

    def change(row):
        if row["config"]["linear"] == "linear":
            row["peak_allocated_bytes"] *= 2
        if row["run"] | {"mode": "step", "dtype": "autocast_bf16"} == row["run"]:
            row["peak_allocated_bytes"] = 1 << 40

    copy = altered(studied, tmp_path, "models", change)
    assert "+100.0%" in first(autocast, copy)
    assert "under autocast 1,020 GiB more" in first(peaks, copy)


def test_the_casts_of_weights_are_half_of_the_matrices(studied):
    """One layer of 64 × 64 (4), 64 × 128 (3), and a head of 256 × 64, in bf16: 65 536 + … bytes, counted exactly."""
    text = first(autocast, studied)
    num_bytes = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 256 * 64)
    assert f"makes 8 bf16 copies of weights, {num_bytes // 1024} KiB in all" in text
    assert "What stays" not in text and "parameter" in text


def test_squares_are_counted_from_bytes(studied, tmp_path):
    text = first(squares, studied)
    for said in (
        "written out in fp32 holds 3.13",
        "torch.softmax in fp32 holds 1.13",
        "own in fp32 holds 1.00",
        "flash in fp32 holds 0.00",
    ):
        assert said in text
    assert text.count("0.12 of it the mask") == 2

    def change(row):
        if row["config"]["implementation"] == "flash":
            row["before_backward_bytes"] += 2 * 4 * row["config"]["seq_len"] ** 2

    assert "flash in fp32 holds 1.00" in first(squares, altered(studied, tmp_path, "attention", change))


def test_the_formula_meets_the_bytes_that_attention_holds(studied):
    assert "over the whole grid the two differ by 8 B." in first(grid, studied)


def test_how_time_grows_is_told_of_lengths_where_the_gpu_sets_the_pace(studied, tmp_path):
    """GIVEN a forward of 1 ms at any length, of which the GPU works a tenth, but at 128 and 256 tokens of n² ns."""

    def change(row):
        if row["status"] == "ok" and row["config"]["head_width"] == 16:
            length = row["config"]["seq_len"]
            row["facts"]["forward_ms"] = length**2 / 1e6 if length > 64 else 1.0
            row["gpu_busy_ns"] = row["samples_device_ns"][0] * (1 if length > 64 else 0.1)
            row["samples_device_ns"] = [row["samples_device_ns"][0]] * 3

    text = first(grid, altered(studied, tmp_path, "attention", change))
    assert "From 128 tokens on the forward's time grows quadratically (power 2.00)." in text
    assert "In 1 of the 3 rows that tell it, of 6 (at 64 tokens) the GPU is busy for 10.0 % of the time" in text


def test_compiled_pays_after_as_many_passes_as_the_figures_say(studied, tmp_path):
    def change(row):
        if row["status"] == "ok":
            is_compiled = row["config"]["implementation"] == "compiled"
            row["samples_device_ns"] = [1_000_000 if is_compiled else 3_000_000] * 3
            row["first_call_ns"] = 10_000_000 if is_compiled else row["first_call_ns"]

    text = first(compiled, altered(studied, tmp_path, "attention", change))
    assert "compiled is 3.00 times as fast as eager" in text and "10.0 ms of compiling after 5 passes" in text


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
def test_what_was_not_measured_is_said(studied, tmp_path, answer):
    copy = shutil.copytree(studied, tmp_path / "copy")
    for measure in ("models", "recordings", "attention", "precision"):
        shutil.rmtree(copy / measure)
    with pytest.raises(Unavailable):
        list(answer(Stored(copy)))


@pytest.mark.skipif(not GPU_TRACE.is_file(), reason="the traces of the H200 are not here")
def test_of_a_gpu_kernels_are_told(studied, tmp_path):
    """GIVEN the trace of an H200 in the place of every trace THEN kernels, nvjet among them, and how busy it was."""
    copy = shutil.copytree(studied, tmp_path / "copy")
    for trace in (copy / "models" / "traces").iterdir():
        shutil.copyfile(GPU_TRACE, trace)
    facts = json.loads((copy / "study.json").read_text())
    (copy / "study.json").write_text(json.dumps(facts | {"device": "cuda"}))
    results = copy / "models" / "results.jsonl"
    rows = [json.loads(line) | {"gpu_busy_ns": 1000} for line in results.read_text().splitlines()]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stored = Stored(copy)

    text = next(part.text for part in products(stored) if isinstance(part, Text))
    assert "Kernels called nvjet" in text
    assert any("10 largest kernels" in part.text for part in products(stored) if isinstance(part, Text))
    table = next(part for part in products(stored) if isinstance(part, Table))
    assert all(few < every for few, every in zip(table.columns["ten_largest_share"], table.columns["training_share"]))
    assert 0 < table.columns["nvjet_share"][0] < table.columns["training_share"][0]
    assert "Kernel2" in next(part.text for part in kernels(stored) if isinstance(part, Text))
    assert any(part.id == "busy" for part in durations(stored) if isinstance(part, Table))
