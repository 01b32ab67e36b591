"""The study nano, run quick on a CPU: every file, whole tables, answers that follow the rows, the note put right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quick_study import canned, changed, first_text
from stepscope.report.parts import Lines, Table, Text
from stepscope.studies.nano import STUDY, compares, faster, memory, sparsity
from stepscope.studies.stored import Stored

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200" / "nano"


def test_every_promised_file_is_there(studied):
    for name in STUDY.files:
        assert (studied / name).stat().st_size > 50, name
    assert all((studied / name).read_bytes()[:4] == b"\x89PNG" for name in STUDY.files if name.endswith(".png"))


def test_no_table_has_an_empty_column(report):
    tables = report.parts(Table)

    assert len(tables) >= 5
    for found in tables:
        empty = [name for name, values in found.columns.items() if all(value is None for value in values)]
        assert found.num_rows and not empty, (found.id, empty)


def test_every_question_is_answered(report):
    for section in report.sections[1:-1]:
        assert isinstance(section.parts[0], Text), section.title


def test_no_sentence_is_canned(stored, tmp_path):
    assert canned(STUDY, stored, tmp_path / "other") == []


def test_sparsity_is_one_minus_density(studied):
    (found,) = [part for part in sparsity(Stored(studied)) if isinstance(part, Table)]

    for left_out, seen in zip(found.columns["sparsity_share"], found.columns["density_share"]):
        assert left_out == pytest.approx(1 - seen)
    sparse = [at for at, name in enumerate(found.columns["attention"]) if name == "sparse_mask"]
    assert all(found.columns["sparsity_share"][at] > 0.5 for at in sparse)


def test_dense_attention_is_causal_and_models_are_of_one_size(studied):
    text = first_text(compares, Stored(studied))

    assert "Dense attention is causal too" in text and "100.0 % of the causal ones" in text
    assert "tiny has as many parameters with every attention" in text


def test_what_no_kernel_skips_is_not_ranked(studied):
    stored = Stored(studied)
    flex = stored.rows("attention").where(attention="sparse_flex")
    assert [record["status"] for record in flex] == ["unproven"]

    text = first_text(faster, stored)
    assert "1 row of sparse_flex not ranked: unproven" in text
    chart = next(part for part in faster(stored) if isinstance(part, Lines))
    (drawn,) = [series for series in chart.series if series.name == "sparse_flex"]
    assert drawn.y == [None] and drawn.gaps == ["unproven"]


def test_the_answer_follows_the_times(studied, tmp_path):
    def slow_dense(row):
        if row["config"]["attention"] == "dense":
            row["samples_device_ns"] = [10**10] * 5

    stored = changed(studied, tmp_path / "slow", "attention", slow_dense)

    assert "it wins from 256 tokens on" in first_text(faster, stored)
    assert "it wins from 256 tokens on" not in first_text(faster, Stored(studied))


def test_the_answer_follows_the_memory(studied, tmp_path):
    def square(row):
        row["peak_allocated_bytes"] = row["config"]["seq_len"] ** 2

    stored = changed(studied, tmp_path / "square", "attention", square)

    assert "dense attention grows quadratically (power 2.00)" in first_text(memory, stored)


def test_the_answer_follows_the_profiler(studied, tmp_path):
    def slow_trace(row):
        row["traced_ns"] = 3 * sorted(row["samples_device_ns"])[len(row["samples_device_ns"]) // 2]

    stored = changed(studied, tmp_path / "traced", "attention", slow_trace)

    assert "takes 3.00 times the median of clean calls" in first_text(compares, stored)


def test_dense_that_is_not_causal_would_be_told(studied, tmp_path):
    def full(row):
        row["facts"].update(density=1.0, causal_density=2.0)

    text = first_text(compares, changed(studied, tmp_path / "full", "attention", full))

    assert "Dense attention is not causal" in text


def test_rows_of_a_gpu_are_answered_too(tmp_path):
    (tmp_path / "study.json").write_text('{"study": "nano", "mode": "full", "device": "cuda", "commands": []}')
    shutil.copytree(RESULTS, tmp_path / "attention")

    text = first_text(faster, Stored(tmp_path))

    assert "sparse_flex at 8192 tokens is" in text and "times as fast as dense" in text
    assert "sparse_flex scattered" in first_text(sparsity, Stored(tmp_path))
