"""The study nano, run quick on a CPU: every file, whole tables, sentences that follow the rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from study_checks import check_files, check_follows, check_report

from quick_study import changed, first_text, table_of
from stepscope.document.model import Lines
from stepscope.studies.nano.study import STUDY, faster, faster_models, latency, memory, presets, skipped
from stepscope.studies.report import answer_of
from stepscope.studies.stored import Stored

pytestmark = pytest.mark.long

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200" / "nano"


def test_every_question_is_answered(report):
    check_report(STUDY, report)


def test_every_promised_file_is_there(report, stored):
    check_files(STUDY, report, stored)


def test_no_sentence_is_canned(stored, tmp_path):
    check_follows(STUDY, stored, tmp_path / "other")


def test_sparsity_is_one_minus_density_and_dense_attention_is_causal(stored):
    found = table_of(skipped, stored, "sparsity")

    for left_out, seen in zip(found["sparsity_share"], found["density_share"]):
        assert left_out == pytest.approx(1 - seen)
    assert "dense attention sees 100.0 % of the causal pairs" in first_text(latency, stored)
    assert len(set(table_of(presets, stored, "models")["num_parameters"])) == 1


def test_what_no_kernel_skips_is_not_ranked(stored):
    assert [row["status"] for row in stored.rows("attention").where(attention="sparse_flex")] == ["unproven"]
    assert "sparse_flex" not in first_text(faster, stored)
    chart = next(part for part in answer_of(faster, stored) if isinstance(part, Lines))
    (drawn,) = [series for series in chart.series if series.name == "sparse_flex"]
    assert drawn.y == [None] and drawn.gaps == ["unproven"]


def timed(median_of):
    """Six times of every row, so that medians have intervals: a function of its knobs gives them."""

    def change(row):
        low, high = median_of({**row["config"], **row["run"]})
        row["samples_device_ns"] = [low, low, low, high, high, high]

    return change


def test_the_answer_follows_the_times(studied, tmp_path):
    slow_dense = timed(lambda knobs: (10**9, 10**9) if knobs["attention"] == "dense" else (10**6, 10**6))
    text = first_text(faster, changed(studied, tmp_path / "slow", "attention", slow_dense))

    assert text.startswith("At 256 tokens sparse_mask is 1000.00 times as fast as dense in inference")
    assert "it wins from 64 tokens on" in text


def test_a_win_within_noise_is_none(studied, tmp_path):
    noise = timed(lambda knobs: (10**6, 3 * 10**6) if knobs["attention"] == "dense" else (10**6, 2 * 10**6))
    text = first_text(faster, changed(studied, tmp_path / "noise", "attention", noise))

    assert "not measurably different from dense" in text and "wins nowhere" in text


def test_wins_that_depend_on_the_pass_are_told_by_pass(studied, tmp_path):
    def median_of(knobs):
        wins = knobs["attention"] != "dense" and (knobs["mode"] == "inference" or knobs["seq_len"] == 128)
        return (10**6, 10**6) if wins else (10**7, 10**7)

    text = first_text(faster, changed(studied, tmp_path / "passes", "attention", timed(median_of)))
    assert "from 64 tokens on in inference and at 128 tokens only in forward+backward" in text


@pytest.mark.parametrize(
    ("alone_ns", "model_ns", "told"),
    [(250_000, 5_000_000, "3.00 times as fast as"), (250_000, 15_000_000, "not measurably different"),
     (2_000_000, 45_000_000, "3.00 times slower than")],
)  # fmt: skip
def test_what_attention_saves_alone_stands_beside_the_model(studied, tmp_path, alone_ns, model_ns, told):
    def medians(dense_ns, sparse_ns):
        return timed(lambda knobs: (dense_ns,) * 2 if knobs["attention"] == "dense" else (sparse_ns,) * 2)

    stored = changed(studied, tmp_path / "models", "models", medians(15_000_000, model_ns))
    stored = changed(stored.folder, tmp_path / "alone", "attention", medians(1_000_000, alone_ns))

    assert f"In tiny at 128 tokens, sparse_mask is {told}" in first_text(faster_models, stored)
    found = table_of(faster_models, stored, "faster-models")
    assert found["alone_would_save_ns"][0] == 2 * (1_000_000 - alone_ns)  # two layers, the same batch


def test_rows_in_which_the_gpu_waits_for_the_host_are_counted(studied, tmp_path):
    def waits(row):
        row["gpu_busy_ns"] = int(sorted(row["samples_device_ns"])[2] * 0.25)

    stored = changed(studied, tmp_path / "waits", "models", waits)
    (found,) = [part for part in answer_of(presets, stored) if getattr(part, "columns", None)]
    assert "8 of 8 rows are host-bound" in found.note


def test_the_answer_follows_the_memory(studied, tmp_path):
    def made_of(row):
        length = row["config"]["seq_len"]
        row["peak_allocated_bytes"] = (
            7 * length**2 if row["config"]["attention"] == "dense" else 4096 * row["num_tokens"]
        )

    text = first_text(memory, changed(studied, tmp_path / "square", "attention", made_of))
    assert "dense attention grows quadratically (7.0 B per token pair; pairs are 100.0 % at 256 tokens)" in text
    assert "sparse_mask attention grows linearly (4.00 KiB per token)" in text


def test_the_cost_of_a_profiled_call_is_told_in_time(studied, tmp_path):
    def same_cost(row):
        row["samples_device_ns"] = [row["config"]["seq_len"] * 1000] * 6
        row["traced_ns"] = row["config"]["seq_len"] * 1000 + 5_000_000

    text = first_text(latency, changed(studied, tmp_path / "traced", "attention", same_cost))
    assert "takes 5.00 ms longer" in text and f"{5256 / 256:.2f} to {5064 / 64:.2f} times as long" in text


def test_rows_of_a_gpu_are_answered_too(tmp_path):
    (tmp_path / "study.json").write_text('{"study": "nano", "mode": "full", "device": "cuda", "commands": []}')
    shutil.copytree(RESULTS, tmp_path / "attention")

    assert "at 8192 tokens sparse_flex is" in first_text(faster, Stored(tmp_path))
    assert "by sparse_flex scattered (8192)" in first_text(skipped, Stored(tmp_path))
