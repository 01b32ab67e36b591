"""The study of the plain transformer: measured once on a CPU; all it promises; sentences that follow the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from study_checks import check_files, check_follows, check_report

from quick_study import changed, first_text, table_of
from stepscope.document.model import Missing
from stepscope.studies.cs336 import kernels as cs336_kernels
from stepscope.studies.cs336.kernels import exactness, kernels, mixed_precision, products
from stepscope.studies.cs336.memory import alive, autocast, peaks
from stepscope.studies.cs336.passes import durations, warm_up
from stepscope.studies.cs336.study import STUDY, compiled, grid, squares
from stepscope.studies.report import answer_of
from stepscope.studies.stored import Stored

pytestmark = pytest.mark.long

GPU_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "h200" / "gpt2_eager.json.gz"


@pytest.fixture
def altered(studied, tmp_path):
    """A copy of the study whose rows of a measure are changed in place."""
    return lambda measure, change: changed(studied, tmp_path / "copy", measure, change)


def test_every_question_is_answered(report):
    check_report(STUDY, report)
    assert not report.parts(Missing)


def test_every_file_it_promises_is_there_and_says_something(report, stored):
    check_files(STUDY, report, stored)


def test_no_sentence_is_canned(stored, tmp_path):
    check_follows(STUDY, stored, tmp_path / "other")


def test_what_does_not_fit_is_a_row(stored):
    assert "oom" in table_of(durations, stored, "durations")["status"]
    assert "tiny 524288 (inference) ran out of memory" in first_text(durations, stored)


def test_the_time_of_a_step_is_that_of_its_passes(altered):
    """GIVEN a backward of 5 s in every pass THEN a step's mean is above 5 s, and its forward next to nothing."""

    def change(row):
        for values in [(row.get("samples_phase_ns") or {}).get("backward", [])]:
            values[:] = [5_000_000_000] * len(values)

    text = first_text(durations, altered("models", change))
    assert "A step takes 5." in text and "(forward 0." in text


def test_a_slow_first_call_is_seen_without_warm_up_only(altered):
    """GIVEN steps of 3 ms after a first one of 1 s THEN the mean of five is 202.4 ms, and one is warm-up enough."""

    def change(row):
        for values in (row.get("samples_phase_ns") or {}).values():
            values[:] = [1_000_000_000 // len(row["samples_phase_ns"]), *([1_000_000] * (len(values) - 1))]

    text = first_text(warm_up, altered("models", change))
    assert "202 ms instead of 3.00 ms, 67.47 times" in text and "a warm-up of 1 brings" in text


def test_a_point_whose_process_had_run_the_check_is_not_cold(stored, altered):
    """Of two lengths the first has run the gate for both: the means without warm-up are those of the second."""
    assert "the mean step of tiny 96 is" in first_text(warm_up, stored)

    def change(row):
        row["gate"] = {**(row["gate"] or {}), "run_by": "another"}

    assert set(table_of(warm_up, altered("models", change), "warm-up")["seq_len"]) == {48, 96}


def test_the_work_of_the_gpu_is_told_apart_from_the_clock(altered, monkeypatch):
    """GIVEN steps of 10 ms of which the GPU works 6 ms in fp32 and 2 ms in bf16 THEN that is 3 times as fast."""
    work_ns = {"fp32": 2_000_000, "autocast_bf16": 666_667}
    monkeypatch.setattr(
        cs336_kernels, "gpu_work_ns",
        lambda _, record: dict.fromkeys(("forward", "backward", "optimizer"), work_ns[record["dtype"]]),
    )  # fmt: skip

    def change(row):
        if row["status"] == "ok" and row["run"]["mode"] == "step":
            row["samples_device_ns"] = [10_000_000] * len(row["samples_device_ns"])

    text = first_text(mixed_precision, altered("models", change))
    assert "is 3.00 times as fast under bf16 autocast, and slower in 0 of 3 passes" in text
    assert "a step is 1.00 times as fast by the clock" in text


def test_autocast_is_as_fast_as_its_samples_say(altered):
    def change(row):
        if row["run"]["dtype"] == "autocast_bf16" and row["status"] == "ok":
            row["samples_device_ns"] = [1000] * len(row["samples_device_ns"])
            row["facts"] |= dict.fromkeys(row["facts"], 0.001)

    assert "slower in 0 of 3 passes" in first_text(mixed_precision, altered("models", change))


def test_peaks_and_einsum_follow_the_rows(stored, altered):
    assert "einsum changes the forward's peak by +0.0%" in first_text(autocast, stored)

    def change(row):
        if row["config"]["linear"] == "linear":
            row["peak_allocated_bytes"] *= 2
        if row["run"] | {"mode": "step", "dtype": "autocast_bf16"} == row["run"]:
            row["peak_allocated_bytes"] = 1 << 40

    copy = altered("models", change)
    assert "+100.0%" in first_text(autocast, copy)
    assert "for step (1,020 GiB more under autocast)" in first_text(peaks, copy)


def test_the_casts_of_weights_are_half_of_the_matrices(stored):
    """One layer of 64 × 64 (4), 64 × 128 (3), and a head of 256 × 64, in bf16, counted exactly."""
    num_bytes = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 256 * 64)
    assert f"{num_bytes // 1024} KiB of cast weights (8 bf16 copies)" in first_text(autocast, stored)
    assert "parameter" in first_text(alive, stored)


def test_squares_are_counted_from_bytes(stored, altered):
    text = first_text(squares, stored)
    for said in ("3.27 with naive", "1.25 with builtin", "1.00 with custom", "0.01 with flash"):
        assert said in text

    def change(row):
        if row["config"]["implementation"] == "flash":
            row["before_backward_bytes"] += row["config"]["heads"] * 4 * row["config"]["seq_len"] ** 2

    assert "1.01 with flash" in first_text(squares, altered("attention", change))


def test_the_formula_meets_the_bytes_that_attention_holds(stored):
    text = first_text(grid, stored)
    assert "8 B from the formula" in text and "grows quadratically" in text and "524288 tokens run out" in text


def test_compiled_pays_after_as_many_passes_as_the_figures_say(altered):
    def change(row):
        if row["status"] == "ok":
            is_compiled = row["config"]["implementation"] == "compiled"
            row["samples_device_ns"] = [1_000_000 if is_compiled else 3_000_000] * 3
            row["first_call_ns"] = 10_000_000 if is_compiled else row["first_call_ns"]

    text = first_text(compiled, altered("attention", change))
    assert "compiled is 3.00 times as fast as eager and pays after 5 passes" in text


def test_sums_in_narrow_dtypes(stored):
    found = table_of(exactness, stored, "running-sums")
    assert dict(zip(found["accumulate_dtype"], found["result"]))["bf16"] == 4.0


def test_what_was_not_measured_is_said(studied, tmp_path):
    copy = shutil.copytree(studied, tmp_path / "copy")
    for measure in ("models", "recordings", "attention", "precision"):
        shutil.rmtree(copy / measure)
    for question in STUDY.questions:
        assert {type(part) for part in answer_of(question, Stored(copy))} == {Missing}


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

    found = table_of(products, stored, "gemm-share")
    assert all(few < every for few, every in zip(found["ten_largest_share"], found["training_share"]))
    assert 0 < found["nvjet_share"][0] < found["training_share"][0]
    assert "Kernel2" in first_text(kernels, stored)
    assert table_of(durations, stored, "busy")["forward_busy_share"]
