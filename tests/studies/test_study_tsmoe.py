"""The study tsmoe, run quick on a CPU: every file, whole tables, answers that follow the data, the note put right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from study_checks import check_files, check_follows, check_report

from quick_study import change_lines, changed, first_text, table_of
from stepscope.document.model import Table
from stepscope.studies.execute import plan_of
from stepscope.studies.recorded import step_of
from stepscope.studies.report import answer_of
from stepscope.studies.stored import Stored
from stepscope.studies.tsmoe import training as runs
from stepscope.studies.tsmoe.study import STUDY, compiled, dispatch, grouped, half, learned, mask, recompiles
from stepscope.studies.tsmoe.training import amp, amp_verdict, mfu, published_runs

pytestmark = pytest.mark.long  # a quick study takes minutes; those of cs336 and nano run always

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200" / "tsmoe"
NOT_COMPILED = ["What does the compiler do, and how often again?"]
COMPILE_REPORT = {
    "num_compiles": 9, "num_graphs": 4, "compile_seconds": 3.5, "cuda_graph_skips": [], "failures": [], "frames": [],
    "recompiles": [{"frame": "forward (moe.py:3)", "failed_guards": [f"0/{i}: x.size() == {i}"]} for i in range(8)],
    "recompile_limit_hits": [{"frame": "forward (moe.py:3)", "count": 1}],
    "graph_breaks": [{"reason": "bincount", "place": "moe.py:3", "count": 2}],
    "cuda_graphs": {"num_recorded": 51, "num_distinct_sizes": 17},
}  # fmt: skip


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    """A study of which only the dispatch was measured, on an H200."""
    folder = tmp_path_factory.mktemp("h200")
    (folder / "study.json").write_text('{"study": "tsmoe", "mode": "full", "device": "cuda", "commands": []}')
    shutil.copytree(RESULTS, folder / "dispatch")
    return folder


def test_all_but_the_compiler_is_answered(report):
    check_report(STUDY, report, unanswered=NOT_COMPILED)


def test_every_promised_file_is_there(report, stored):
    check_files(STUDY, report, stored)


def test_no_sentence_is_canned(stored, tmp_path):
    check_follows(STUDY, stored, tmp_path / "other", fixed=NOT_COMPILED)


def test_a_recording_knows_its_tokens_and_its_active_parameters(stored):
    record = step_of(stored.recording("training", dtype="fp32"))

    assert (record["num_parameters"], record["num_active_parameters"]) == (122_921, 90_153)
    # 16 tokens in a step; a typical step may be shorter than the average one, which the throughput stands for.
    assert 0 < record["tokens_per_s"] < 2 * 16 / (record["step_ns"] / 1e9)


def test_both_computations_of_the_mfu(stored):
    found = table_of(mfu, stored, "mfu")
    wrong, _, right = (dict(zip(found, row)) for row in list(zip(*found.values()))[:3])

    assert wrong["flops_per_s"] / 1e12 == pytest.approx(319.82, rel=0.001)  # as the note prints it
    assert wrong["mfu_share"] == pytest.approx(0.1616, rel=0.001)
    # 6·N and 6·L·S·d, over 989.4 TFLOP/s.
    per_token = 6 * 198_392_169 + 6 * 12 * 4096 * 768
    assert right["token_flops"] == per_token
    assert right["mfu_share"] == pytest.approx(134_339 * per_token / 989.4e12)
    # Runs that were held against a typed peak: against the 756 TFLOP/s of that device.
    at = found["run"].index(f"the note's run on {runs.FLASH.device}, flash")
    assert found["mfu_share"][at] == pytest.approx(0.1276, rel=0.001)
    assert found["mfu_share"][at + 1] == pytest.approx(89_583 * per_token / 756e12)


def test_figures_of_the_note_stand_beside_ours_with_their_device(studied):
    stored = Stored(studied)
    assert published_runs.rows(stored) == []
    for recorded in stored.recordings("training"):
        recorded.axes.update(preset="538m", batch=16, seq_len=4096)
    found = published_runs.rows(anew(stored))

    assert [row["device"] for row in found[1:]] == [
        f"{line.device} ({runs.NOTE})" for line in (runs.MASKED, runs.FLASH, runs.SXM)
    ]
    assert found[3]["tokens_per_s"] == 134_339 and found[3]["flops_per_s"] == pytest.approx(190.3e12, rel=0.001)


def anew(stored):
    """The same recordings, every table computed anew."""
    again = Stored(stored.folder)
    again.once(("recordings", "training"), lambda: stored.recordings("training"))
    return again


def test_the_answer_to_amp_follows_the_times(studied, tmp_path):
    copy = shutil.copytree(studied, tmp_path / "copy")

    def longer(sample):
        if "wall_ns" in sample:
            sample["wall_ns"] *= 1000
            sample["host_ns"] = {phase: ns * 1000 for phase, ns in sample["host_ns"].items()}

    change_lines(Stored(copy).recording("training", dtype="fp32").folder / "samples.jsonl", longer)
    assert "times as fast as fp32 for tiny (1 × 16), 122,921 parameters" in first_text(amp, Stored(copy))


def test_amp_where_the_host_sets_the_pace():
    def step(ms, idle):
        return {"model": "23m", "step_ns": ms * 1e6, "gpu_idle_share": idle}

    assert amp_verdict(step(20, 0.90), step(60, 0.95)).startswith("3.00 times slower than fp32 for 23m (60.0 ms")
    for near_ms in (55, 65):  # no more than one process differs from another
        text = amp_verdict(step(near_ms, 0.90), step(60, 0.95))
        assert "not measurably different" in text and f"3.00 ms instead of {near_ms / 10:.2f} ms of GPU work" in text
    assert amp_verdict(step(120, 0.1), step(60, 0.95)).startswith("2.00 times as fast as fp32 for 23m")
    assert amp_verdict(step(120, None), step(60, None)).startswith("2.00 times as fast as fp32 for 23m")


def test_the_full_study_has_a_size_at_which_the_host_sets_the_pace():
    points = plan_of(STUDY, "full", "cuda").points["training"]
    sizes = [(p.preset, p.config["batch"], p.config["seq_len"], p.run["dtype"]) for p in points]

    assert len(sizes) == len(set(sizes)) == 6
    assert {("23m", 1, 512, dtype) for dtype in ("fp32", "autocast_bf16")} < set(sizes)


def test_casts_are_counted_where_amp_makes_them(stored):
    plain, low = table_of(amp, stored, "amp")["num_casts"]
    assert low > plain + 50


def test_an_inverted_mask_is_refused_and_the_right_one_is_not(stored):
    found = table_of(mask, stored, "masks")

    assert dict(zip(found["mask"], found["status"])) == {"causal": "ok", "given": "ok", "inverted": "wrong"}
    assert found["outputs_deviation"][1] < 1e-5 and found["outputs_deviation"][2] > 0.05
    assert dict(zip(found["mask"], found["time_median_ns"]))["inverted"] is None
    attention = table_of(mask, stored, "attention")
    assert not {"not_seen", "mask", "dtype"} & set(attention["why_not_flash"])  # words, not codes
    assert attention["mask"] == ["causal", "given"] and attention["num_calls"] == [2, 2]


def test_the_cost_of_a_mask_follows_the_steps(studied, tmp_path):
    def timed(row):
        row["samples_device_ns"] = [(3 if row["config"]["mask"] == "given" else 2) * 10**6] * 3

    text = first_text(mask, changed(studied, tmp_path / "copy", "masks", timed))
    assert "a step 1.50 times as long (3.00 ms instead of 2.00 ms)" in text


def test_a_model_with_another_loss_is_not_ranked(stored, studied, tmp_path):
    def broken(row):
        if row["config"]["dispatch"] == "capacity":
            row["loss"], row["samples_device_ns"] = 260.0, [1000] * 3

    before = first_text(dispatch, stored)
    after = first_text(dispatch, changed(studied, tmp_path / "copy", "dispatch", broken))
    assert "6 variants" in before and "another model" not in before
    assert "5 variants" in after and "capacity compute another model" in after
    assert "capacity is the fastest" not in after


def test_the_slow_dispatch_is_explained_by_its_ops(stored, studied, tmp_path):
    def slow(row):
        row["samples_device_ns"] = [(5 if row["config"]["dispatch"] == "indexed" else 2) * 10**6] * 3

    text = first_text(half, changed(studied, tmp_path / "copy", "dispatch", slow))
    assert "indexed is 2.50 times slower than capacity" in text
    # 32 slots of 16 tokens in 4 experts, each with 16 rows.
    assert "32 of 64 rows per layer are padding" in text
    assert len(table_of(half, stored, "indexing")["op"]) == 10


def test_rows_of_a_gpu_are_answered_too(on_gpu):
    stored = Stored(on_gpu)

    assert "10 variants with the same loss" in first_text(dispatch, stored)
    assert all(text in first_text(grouped, stored) for text in ("from grouped", "(eager)", "(compiled)"))
    found = table_of(compiled, stored, "compiled")
    steps = [round(steps) for steps in found["num_break_even_steps"] if steps]
    assert (min(steps), max(steps)) == (359, 541)
    assert dict(zip(found["dispatch"], found["num_graphs"]))["loop"] == 10


def test_what_cannot_be_told_apart_is_a_tie(on_gpu, tmp_path):
    def alike(row):
        eager_ns = 5000 if row["config"]["dispatch"] == "indexed" else 2000
        row["samples_device_ns"] = [eager_ns if row["run"]["compile"] == "off" else 1000] * 10

    assert "(a tie with " in first_text(dispatch, changed(on_gpu, tmp_path / "copy", "dispatch", alike))


def test_a_part_that_could_not_be_compiled_is_told(on_gpu, tmp_path):
    def noted(row):
        row["notes"] = ["torch could not compile a part, which ran as it is: bincount"]

    stored = changed(on_gpu, tmp_path / "copy", "dispatch", noted)
    (found,) = [part for part in answer_of(dispatch, stored) if isinstance(part, Table)]
    assert "loop compiled (default): " in found.note and "bincount" in found.note


@pytest.fixture
def with_compiled(studied, on_gpu, tmp_path):
    """A study whose training runs pass for compiled ones, with what the compiler left."""
    copy = shutil.copytree(on_gpu, tmp_path / "copy")
    shutil.copytree(studied / "training", copy / "compiled")
    change_lines(copy / "compiled" / "results.jsonl", lambda row: row["run"].update(compile="reduce-overhead"))
    for recorded in Stored(copy).recordings("compiled"):
        (recorded.folder / "compile.json").write_text(json.dumps(COMPILE_REPORT))
    return copy


def test_recompiles_and_sizes_of_cuda_graphs_come_from_the_recordings(with_compiled):
    rows = learned.rows(Stored(with_compiled))
    assert [(r["num_recompiles"], r["num_limit_hits"], r["num_cuda_graph_sizes"]) for r in rows] == [(8, 1, 17)] * 2
    found = recompiles.rows(Stored(with_compiled))
    assert found[0]["num_times"] == 8 and found[0]["values_seen"] == "0, 1, 2, 3, 4, 5, 6, 7"


def test_a_compiled_run_that_crashed_tells_how_far_it_came(with_compiled):
    """GIVEN a recording that crashed THEN it tells its recompiles, without our folders."""
    crash = {"status": "crashed", "reason": "AssertionError: a guard failed. # /home/me/src/moe/gelu.py:23 in x"}
    results = with_compiled / "compiled" / "results.jsonl"
    change_lines(results, lambda row: row.update(crash if row["run"]["dtype"] == "fp32" else {}))

    crashed, ended = learned.rows(Stored(with_compiled))
    assert crashed["num_recompiles"] == 8 and crashed["num_steps"] and ended["num_steps"] and ended["step_ns"]
    assert crashed["what"] == "AssertionError: a guard failed. # moe/gelu.py:23 in x"
    assert "is crashed with 8 recompiles" in first_text(compiled, Stored(with_compiled))
