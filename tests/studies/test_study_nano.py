"""The study nano, run quick on a CPU: every file, whole tables, answers that follow the rows, the note put right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quick_study import canned, changed, first_text
from stepscope.document.model import Lines, Table, Text
from stepscope.studies.nano.answers import faster, memory, sparsity
from stepscope.studies.nano.models import compares, faster_models, models
from stepscope.studies.nano.study import STUDY
from stepscope.studies.stored import Stored

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200" / "nano"


def all_text(answer, stored):
    return " ".join(part.text for part in answer(stored) if isinstance(part, Text))


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

    assert "1 row of sparse_flex not ranked: unproven" in all_text(faster, stored)
    chart = next(part for part in faster(stored) if isinstance(part, Lines))
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
    stored = changed(studied, tmp_path / "slow", "attention", slow_dense)

    text = first_text(faster, stored)
    assert text.startswith(
        "Against dense attention, sparse_mask wins from 256 tokens on. At 1024 tokens sparse_mask is"
    )
    assert (
        "1000.00 times as fast as dense in inference and 1000.00 times as fast as dense in forward+backward." in text
    )
    assert "wins from 256 tokens on" not in first_text(faster, Stored(studied))


def test_a_win_within_noise_is_none(studied, tmp_path):
    noise = timed(lambda knobs: (10**6, 3 * 10**6) if knobs["attention"] == "dense" else (10**6, 2 * 10**6))
    stored = changed(studied, tmp_path / "noise", "attention", noise)

    text = first_text(faster, stored)
    assert "sparse_mask wins nowhere" in text and "not to be told from dense" in text


def test_wins_that_depend_on_the_pass_are_told_by_pass(studied, tmp_path):
    def median_of(knobs):
        wins = knobs["attention"] != "dense" and (knobs["mode"] == "inference" or knobs["seq_len"] == 512)
        return (10**6, 10**6) if wins else (10**7, 10**7)

    stored = changed(studied, tmp_path / "passes", "attention", timed(median_of))

    assert (
        "sparse_mask wins from 256 tokens on in inference and at 512 tokens only in forward+backward."
    ) in first_text(faster, stored)


def test_the_model_may_be_slower_with_what_is_faster_alone(studied, tmp_path):
    slow_sparse = timed(lambda knobs: (10**6, 10**6) if knobs["attention"] == "dense" else (3 * 10**6, 3 * 10**6))
    stored = changed(studied, tmp_path / "slow", "models", slow_sparse)

    text = first_text(faster_models, stored)
    for length in (128, 256):
        assert (
            f"In tiny at {length} tokens sparse_mask is 3.00 times slower than dense in inference and 3.00 times "
            "slower than dense in a step."
        ) in text


@pytest.mark.parametrize(
    ("answer", "measure"), [(faster, "attention"), (faster_models, "models"), (models, "models")]
)
def test_rows_in_which_the_gpu_waits_for_the_host_are_told(studied, tmp_path, answer, measure):
    def waits(row):
        if row.get("samples_device_ns"):
            row["gpu_busy_ns"] = int(sorted(row["samples_device_ns"])[2] * 0.25)

    stored = changed(studied, tmp_path / "waits", measure, waits)

    assert "the GPU is busy for 25.0 % of the time: the host sets the pace there." in all_text(answer, stored)
    assert "the host sets the pace" not in all_text(answer, Stored(studied))


def test_the_answer_follows_the_memory(studied, tmp_path):
    def made_of(row):
        length = row["config"]["seq_len"]
        row["peak_allocated_bytes"] = (
            7 * length**2 if row["config"]["attention"] == "dense" else 4096 * row["num_tokens"]
        )

    stored = changed(studied, tmp_path / "square", "attention", made_of)

    text = first_text(memory, stored)
    assert (
        "dense attention in inference grows quadratically: 7.0 B for each pair of tokens; at 1024 tokens the pairs "
        "are 100.0 % of it."
    ) in text
    assert "sparse_mask attention in inference grows linearly: 4.00 KiB for each token, nothing for pairs." in text
    assert "two lengths cannot tell linear from quadratic" in all_text(memory, stored)  # of the model


def test_the_answer_follows_the_profiler(studied, tmp_path):
    def slow_trace(row):
        row["traced_ns"] = 3 * sorted(row["samples_device_ns"])[len(row["samples_device_ns"]) // 2]

    stored = changed(studied, tmp_path / "traced", "attention", slow_trace)

    text = first_text(compares, stored)
    assert "from 3.00 times as long at " in text and "to 3.00 times as long at " in text


def test_the_cost_of_a_profiled_call_and_of_a_first_one_are_told_in_time(studied, tmp_path):
    def same_cost(row):
        row["samples_device_ns"] = [row["config"]["seq_len"] * 1000] * 6
        row["traced_ns"] = row["config"]["seq_len"] * 1000 + 5_000_000
        row["first_call_ns"] = 7_000_000 if row["config"]["attention"] == "dense" else 9_000_000

    text = first_text(compares, changed(studied, tmp_path / "traced", "attention", same_cost))

    assert (
        "takes 5.00 ms more than clean calls in the median (5.00 ms to 5.00 ms): from 5.88 times as long at 1024 "
        "tokens (dense in inference) to 20.5 times as long at 256 tokens (dense in inference)."
    ) in text
    assert (
        "The first call of a process takes 7.00 ms with dense, which loads its kernels and 9.00 ms with sparse_mask, "
        "which loads its kernels."
    ) in text


def test_dense_that_is_not_causal_would_be_told(studied, tmp_path):
    def full(row):
        row["facts"].update(density=1.0, causal_density=2.0)

    text = first_text(compares, changed(studied, tmp_path / "full", "attention", full))

    assert "Dense attention is not causal" in text


def test_rows_of_a_gpu_are_answered_too(tmp_path):
    (tmp_path / "study.json").write_text('{"study": "nano", "mode": "full", "device": "cuda", "commands": []}')
    shutil.copytree(RESULTS, tmp_path / "attention")

    text = first_text(faster, Stored(tmp_path))

    assert "At 8192 tokens sparse_flex is" in text and "times as fast as dense in forward+backward" in text
    told = all_text(sparsity, Stored(tmp_path))
    assert "sparse_flex scattered" in told and "Random keys one by one instead of in blocks, at 8192 tokens" in told


def test_fewer_flops_are_held_against_the_time_that_they_save(studied, tmp_path):
    def as_flex(row):
        is_mask = row["config"]["attention"] == "sparse_mask"
        row["config"]["attention"] = "sparse_flex" if is_mask else row["config"]["attention"]
        row["facts"]["attention_executed_flops"] = 10**9 if is_mask else 8 * 10**9
        row["samples_device_ns"] = [10**6 if is_mask else 2 * 10**6] * 6

    assert (
        "In inference at 1024 tokens sparse_flex executes 8.00 times fewer FLOPs than dense and is 2.00 times as "
        "fast as it: it reaches 1.00 TFLOP/s, dense 4.00 TFLOP/s."
    ) in all_text(sparsity, changed(studied, tmp_path / "flex", "attention", as_flex))


def test_sizes_are_told_once(studied):
    text = all_text(faster, Stored(studied))

    assert text.count("heads of width") == text.count("The sparse pattern: fixed, a window of ") == 1
    assert "tiny: 2 layers" in all_text(models, Stored(studied))


@pytest.mark.parametrize(
    ("alone_ns", "model_ns", "told"),
    [
        (250_000, 13_000_000, "1.50 ms (10.0 %) of 15.0 ms in a step (the model takes 2.00 ms less)"),
        (250_000, 15_000_000, "1.50 ms (10.0 %) of 15.0 ms in a step (the model is not to be told from dense)"),
        (2_000_000, 19_000_000, "nothing of 15.0 ms in a step (the model takes 4.00 ms more)"),
    ],
)
def test_what_attention_saves_alone_stands_beside_what_the_model_takes_less(
    studied, tmp_path, alone_ns, model_ns, told
):
    def medians(dense_ns, sparse_ns):
        return timed(lambda knobs: (dense_ns,) * 2 if knobs["attention"] == "dense" else (sparse_ns,) * 2)

    stored = changed(studied, tmp_path / "models", "models", medians(15_000_000, model_ns))
    stored = changed(stored.folder, tmp_path / "alone", "attention", medians(1_000_000, alone_ns))

    text = all_text(faster_models, stored)
    assert "in tiny at 256 tokens sparse_mask would save " in text and told in text


def test_a_difference_of_models_says_where_nothing_tells_who_sets_the_pace(studied, tmp_path):
    def busy(row):
        if row["config"]["seq_len"] == 256:
            row["gpu_busy_ns"] = min(row["samples_device_ns"])

    *_, short, long = first_text(faster_models, changed(studied, tmp_path / "busy", "models", busy)).split("In tiny")
    assert short.endswith("(how busy the GPU is there was not measured). ") and "not measured" not in long
    assert "was not measured" not in first_text(faster_models, Stored(studied))  # a CPU


def test_presets_are_told_at_the_longest_length_that_all_have_and_at_their_own(studied, tmp_path):
    def another(row):
        if row["config"]["seq_len"] == 128:
            row["preset"] = "small"

    told = first_text(models, Stored(studied))
    assert " at 256 tokens: inference" in told and " at 128 tokens: inference" not in told
    apart = first_text(models, changed(studied, tmp_path / "apart", "models", another))
    assert "small (" in apart and " at 128 tokens: inference" in apart and " at 256 tokens: inference" in apart
