"""The study tsmoe, run quick on a CPU: every file, whole tables, answers that follow the data, the note put right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quick_study import canned, change_lines, changed, first_text
from stepscope.document.model import Bars, Table, Text
from stepscope.errors import Unavailable
from stepscope.studies.execute import plan_of
from stepscope.studies.stored import Stored
from stepscope.studies.tsmoe import amp as tsmoe_amp
from stepscope.studies.tsmoe import compiled as tsmoe_compiled
from stepscope.studies.tsmoe import note
from stepscope.studies.tsmoe import training as tsmoe_training
from stepscope.studies.tsmoe.amp import amp, amp_pace, amp_verdict
from stepscope.studies.tsmoe.compiled import compiled
from stepscope.studies.tsmoe.experts import grouped, half
from stepscope.studies.tsmoe.study import STUDY
from stepscope.studies.tsmoe.training import mfu, step_of, training
from stepscope.studies.tsmoe.variants import dispatch, mask

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200" / "tsmoe"
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


def slowed(stored, factor, measure, **values):
    """Every step of some recordings, so many times longer."""

    def longer(sample):
        if "wall_ns" not in sample:  # a line that only brings the loss
            return
        sample["wall_ns"] = round(sample["wall_ns"] * factor)
        sample["host_ns"] = {phase: round(ns * factor) for phase, ns in sample["host_ns"].items()}

    for recorded in stored.recordings(measure, **values):
        change_lines(recorded.folder / "samples.jsonl", longer)


def table_of(answer, stored, id):
    return next(part for part in answer(stored) if isinstance(part, Table) and part.id == id)


def test_every_promised_file_is_there(studied):
    for name in STUDY.files:
        assert (studied / name).stat().st_size > 50, name


def test_no_table_has_an_empty_column(report):
    tables = report.parts(Table)

    assert {"training", "mfu", "amp", "attention", "masks", "dispatch", "indexing", "grouped"} <= {
        t.id for t in tables
    }
    for found in tables:
        empty = [name for name, values in found.columns.items() if all(value is None for value in values)]
        assert found.num_rows and not empty, (found.id, empty)


def test_all_but_the_compiler_is_answered(report):
    unanswered = [section.title for section in report.sections[1:-1] if not isinstance(section.parts[0], Text)]
    assert unanswered == ["What does the compiler do, and how often again?"]


def test_no_sentence_is_canned(stored, tmp_path):
    assert canned(STUDY, stored, tmp_path / "other") == [
        "What does the compiler do, and how often again?"
    ]  # not on a CPU


def test_a_recording_knows_its_tokens_and_its_active_parameters(studied):
    stored = Stored(studied)
    record = step_of(stored.recording("training", dtype="fp32", d_model=64))

    assert (record["num_parameters"], record["num_active_parameters"]) == (122_921, 90_153)
    assert record["tokens_per_s"] * record["step_ns"] / 1e9 == pytest.approx(16)


def test_both_computations_of_the_mfu(studied):
    found = table_of(mfu, Stored(studied), "mfu").columns
    wrong, _, right = (dict(zip(found, row)) for row in list(zip(*found.values()))[:3])

    assert wrong["flops_per_s"] / 1e12 == pytest.approx(note.SXM.tflops, rel=0.001)
    assert wrong["mfu_share"] == pytest.approx(note.SXM.mfu_share, rel=0.001)
    # 6·N and 6·L·S·d, over 989.4 TFLOP/s.
    per_token = 6 * 198_392_169 + 6 * 12 * 4096 * 768
    assert right["token_flops"] == per_token
    assert right["mfu_share"] == pytest.approx(134_339 * per_token / 989.4e12)
    assert "1.19 times that" in first_text(mfu, Stored(studied))
    # Runs that were held against a typed peak: against the 756 TFLOP/s of that device.
    at = found["run"].index(f"the note's run on {note.FLASH.device}, flash")
    assert found["mfu_share"][at] == pytest.approx(note.FLASH.mfu_share, rel=0.001)
    assert found["mfu_share"][at + 1] == pytest.approx(89_583 * per_token / 756e12)


def test_what_keeps_the_mfu_low_is_told_from_the_kernels(monkeypatch):
    times = {"gemm": 30e6, "elementwise": 40e6, "attention_forward": 10e6, "attention_backward": 10e6, "norm": 8e6}
    monkeypatch.setattr(tsmoe_training, "_kernel_classes", lambda _stored, _main: dict(times))
    main = {"step_ns": 100e6, "mfu_share": 0.2, "gpu_idle_share": 0.02}

    (part,) = tsmoe_training._why_not_more(None, main)
    assert "products take 30.0 ms and attention 20.0 ms, 50.0 % of a step" in part.text
    assert "they reach 40.0 % of the peak" in part.text and "count, elementwise 40.0 ms and norm 8.00 ms" in part.text
    assert part.text.endswith("and here that is not it.")
    (waiting,) = tsmoe_training._why_not_more(None, main | {"gpu_idle_share": 0.5})
    assert waiting.text.endswith("and here that is it.")


def test_one_field_under_two_names(studied):
    texts = [part.text for part in training(as_the_note(studied)) if isinstance(part, Text)]

    assert any("in 32 lines: in 32 of them they are the same number" in text for text in texts)


def as_the_note(folder):
    """The study with the largest model told to be the note's, so that what is beside it is there too."""
    stored = Stored(folder)
    for recorded in stored.recordings("training"):
        recorded.axes.update(preset="538m", batch=16, seq_len=4096)
    return stored


def test_figures_of_the_note_stand_beside_ours_with_their_device(studied):
    found = table_of(training, as_the_note(studied), "published-training").columns

    assert found["device"][1:] == [f"{line.device} ({note.NOTE})" for line in (note.MASKED, note.FLASH, note.SXM)]
    assert found["tokens_per_s"][3] == 134_339 and found["flops_per_s"][3] == pytest.approx(190.3e12, rel=0.001)
    with pytest.raises(Unavailable, match="this run has tiny"):
        list(training(Stored(studied)))


def test_the_answer_to_amp_follows_the_times(studied, tmp_path):
    copy = shutil.copytree(studied, tmp_path / "copy")
    slowed(Stored(copy), 1000, "training", dtype="fp32", d_model=128)
    slowed(Stored(copy), 1000, "training", dtype="autocast_bf16", d_model=64)

    text = first_text(amp, Stored(copy))

    assert "AMP pays for tiny (1 × 16), 475,113 parameters (" in text
    assert "not pay for tiny (1 × 16), 122,921 parameters (" in text
    assert text != first_text(amp, Stored(studied))


def test_why_amp_does_not_pay_where_the_host_sets_the_pace():
    def step(ms, idle, kernels):
        return {"model": "23m (1 × 512)", "step_ns": ms * 1e6, "gpu_idle_share": idle, "num_kernels": kernels}

    plain, low = step(20, 0.90, 3320), step(60, 0.95, 4094)
    assert amp_verdict([(plain, low)]) == (
        "AMP does not pay for 23m (1 × 512) (3.00 times slower than fp32). There the GPU has nothing to do for "
        "95.0 % of a step: the host sets the pace, and launches 4,094 kernels with AMP instead of 3,320."
    )
    for near in (step(55, 0.90, 3320), step(65, 0.90, 3320)):  # no more than one process differs from another
        text = amp_verdict([(near, low)])
        assert text.startswith("For 23m (1 × 512) it cannot be told: 60.0 ms with AMP and ") and "pay" not in text
        assert f"the GPU's work is 3.00 ms instead of {near['step_ns'] / 1e7:.2f} ms." in text
    assert "at which it does not; none of them is so small" in amp_verdict([(step(120, 0.1, 1), low)])
    assert amp_verdict([(step(120, None, 1), low)]).endswith("No size was measured at which it does not.")
    assert "what AMP saves on the GPU is not seen" in amp_pace(plain, low)
    assert "with one 2.00 times slower it would not pay" in amp_pace(step(120, 0.1, 1), low)
    assert amp_pace(plain, step(20, 0.1, 1)) == amp_pace(plain, step(20, None, 1)) == ""


def test_the_small_models_are_held_against_each_other_by_their_tokens():
    small = {"d_ff": 192, "batch": 4, "seq_len": 4096, "step_ns": 1e8, "gpu_idle_share": 0.1}
    rates = (note.SMALL_FP32_TOKENS_PER_S, note.SMALL_AMP_TOKENS_PER_S)

    text = tsmoe_amp._small_said([{**small, "tokens_per_s": rate} for rate in (rates[0] / 2, rates[1] * 2)], rates)
    assert "in fp32, 0.50 times the note's, and 217,560 with AMP, 2.00 times." in text
    assert "d_ff=1536, ours 192" in text and "are 65,163 tokens a step, where its command has 16,384 and ours" in text


def test_a_step_is_drawn_as_a_whole(studied):
    chart = next(part for part in amp(Stored(studied)) if isinstance(part, Bars))

    assert [sum(parts) for parts in zip(*(series.y for series in chart.series))] == pytest.approx([1.0] * 4)


def test_the_full_study_has_a_size_at_which_the_host_sets_the_pace():
    points = plan_of(STUDY, "full", "cuda").points["training"]
    sizes = [(p.preset, p.config["batch"], p.config["seq_len"], p.run["dtype"]) for p in points]

    assert len(sizes) == len(set(sizes)) == 6
    assert {("23m", 1, 512, dtype) for dtype in ("fp32", "autocast_bf16")} < set(sizes)


def test_casts_are_counted_where_amp_makes_them(studied):
    found = table_of(amp, Stored(studied), "amp").columns

    for plain, low in zip(found["num_casts"][::2], found["num_casts"][1::2]):
        assert low > plain + 50


def test_an_inverted_mask_is_refused_and_the_right_one_is_not(studied):
    found = table_of(mask, Stored(studied), "masks").columns
    status = dict(zip(found["mask"], found["status"]))

    assert status == {"causal": "ok", "given": "ok", "inverted": "wrong"}
    assert found["outputs_deviation"][1] < 1e-5 and found["outputs_deviation"][2] > 0.05
    assert dict(zip(found["mask"], found["time_median_ns"]))["inverted"] is None
    texts = [part.text for part in mask(Stored(studied)) if isinstance(part, Text)]
    assert "(at the size of the check: d_model 32, 2 layers, 2 × 48): that row is not timed" in texts[1]
    attention = table_of(mask, Stored(studied), "attention").columns
    assert not {"not_seen", "mask", "dtype"} & set(attention["why_not_flash"])  # words, not codes
    assert attention["mask"] == ["causal", "given"] and attention["num_calls"] == [2, 2]


def test_the_cost_of_a_mask_follows_the_steps(studied, tmp_path):
    def timed(row):
        row["samples_device_ns"] = [(3 if row["config"]["mask"] == "given" else 2) * 10**6] * 3

    text = first_text(mask, changed(studied, tmp_path / "copy", "masks", timed))

    assert "a step takes 3.00 ms instead of 2.00 ms, 1.50 times" in text
    assert "Measured on tiny with 2 layers, 122,921 parameters, 1 × 16, routing=learned." in text
    assert "with 12 layers, it is 1.68 times" in text


def test_a_model_with_another_loss_is_not_ranked(studied, tmp_path):
    def broken(row):
        if row["config"]["dispatch"] == "capacity":
            row["loss"], row["samples_device_ns"] = 260.0, [1000] * 3

    before = first_text(dispatch, Stored(studied))
    after = first_text(dispatch, changed(studied, tmp_path / "copy", "dispatch", broken))

    assert "6 variants of one model" in before and "Not ranked" not in before
    assert "5 variants of one model" in after and "their losses are others: capacity." in after
    assert "capacity is the fastest" not in after


def test_the_slow_dispatch_is_explained_by_its_ops(studied, tmp_path):
    def slow(row):
        row["samples_device_ns"] = [(5 if row["config"]["dispatch"] == "indexed" else 2) * 10**6] * 3

    first, second = (
        part.text
        for part in half_parts(changed(studied, tmp_path / "copy", "dispatch", slow))
        if isinstance(part, Text)
    )

    assert "indexed takes 5.00 ms a step and is 2.50 times slower than capacity" in first
    # 32 slots of 16 tokens in 4 experts, each with 16 rows.
    assert "In a layer 32 of 64 rows are nobody's" in first
    assert "index_put, takes" in second and "instead of 0 ms" in second
    assert len(table_of(half, Stored(studied), "indexing").columns["op"]) == 10


def half_parts(stored):
    """The answer as far as a CPU has it."""
    try:
        yield from half(stored)
    except Unavailable as reason:
        assert "serialized_scatter" in str(reason)


def test_rows_of_a_gpu_are_answered_too(on_gpu):
    stored = Stored(on_gpu)

    text = first_text(dispatch, stored)
    assert "10 variants of one model" in text and "0.52391 to 0.52397" in text
    assert "2,760 launches instead of 4,294 of loop" in first_text(grouped, stored)
    text = first_text(compiled, stored)
    assert "one graph without a break, 0 recompiles" in text and "paid back after 359 to 541 steps" in text
    assert "loop compiled (default): 10 graphs, 10 breaks, 2 recompiles; unproven: nothing shows that it ran" in text
    assert " (MFU " in first_text(dispatch, stored)


def test_what_cannot_be_told_apart_is_not_ranked(on_gpu, tmp_path):
    def alike(row):
        row["run"]["optimizer"] = "adamw" if row["run"]["compile"] != "reduce-overhead" else "fused"
        eager_ns = 5000 if row["config"]["dispatch"] == "indexed" else 2000
        row["samples_device_ns"] = [eager_ns if row["run"]["compile"] == "off" else 1000] * 10

    text = first_text(dispatch, changed(on_gpu, tmp_path / "copy", "dispatch", alike))
    assert "not to be told from " in text
    assert (
        "intervals of the medians meet; capacity compiled (reduce-overhead) has optimizer=fused, the loop adamw"
        in text
    )
    assert "the eager ones differ by 0.0 % at most; the compiler makes one and the same way 2.00 times" in text


def test_only_what_is_paid_back_is_told_to_be():
    def row(dispatch, steps):
        return {"dispatch": dispatch, "compile": "default", "time_median_ns": 1000, "num_recompiles": 0,
                "num_break_even_steps": steps}  # fmt: skip

    text = tsmoe_compiled._whole_sentence([row("capacity", 548.5), row("grouped", 576.4), row("tile", None)])
    assert "paid back after 548 to 576 steps: capacity compiled (default) and grouped compiled (default)." in text
    assert text.endswith("For tile compiled (default) there is no slower eager row with the same optimizer.")


def test_a_part_that_could_not_be_compiled_is_told(on_gpu, tmp_path):
    def noted(row):
        row["notes"] = ["torch could not compile a part, which ran as it is: bincount"]

    text = first_text(compiled, changed(on_gpu, tmp_path / "copy", "dispatch", noted))
    assert "2 recompiles; unproven: torch could not compile a part, which ran as it is: bincount." in text


def test_recompiles_and_sizes_of_cuda_graphs_come_from_the_recordings(studied, on_gpu, tmp_path):
    copy = shutil.copytree(on_gpu, tmp_path / "copy")
    shutil.copytree(studied / "training", copy / "compiled")
    change_lines(copy / "compiled" / "results.jsonl", lambda row: row["run"].update(compile="reduce-overhead"))
    for recorded in Stored(copy).recordings("compiled"):
        (recorded.folder / "compile.json").write_text(json.dumps(COMPILE_REPORT))

    texts = [part.text for part in compiled(Stored(copy)) if isinstance(part, Text)]

    assert "8 recompiles of forward (moe.py:3), 1 function at the limit, 51 CUDA graphs for 17 sizes" in texts[1]
    found = table_of(compiled, Stored(copy), "recompiles").columns
    assert found["num_times"][0] == 8 and found["values_seen"][0] == "0, 1, 2, 3, 4, 5, 6, 7"


def test_a_compiled_run_that_crashed_tells_how_far_it_came(studied, on_gpu, tmp_path):
    """GIVEN a recording without FLOPs, and one that crashed THEN both tell their recompiles, without our folders."""
    copy = shutil.copytree(on_gpu, tmp_path / "copy")
    shutil.copytree(studied / "training", copy / "compiled")
    crash = {
        "status": "crashed",
        "reason": "AssertionError: a guard failed. A bug. # /home/me/src/moe/gelu.py:23 in x",
    }
    change_lines(
        copy / "compiled" / "results.jsonl", lambda row: row.update(crash if row["run"]["dtype"] == "fp32" else {})
    )
    frame = {"frame": "forward (/home/me/src/moe/layers.py:3)", "failed_guards": ["0/0: x.size() == 1"]}
    for recorded in Stored(copy).recordings("compiled"):
        (recorded.folder / "compile.json").write_text(json.dumps({**COMPILE_REPORT, "recompiles": [frame] * 3}))
        facts = json.loads((recorded.folder / "recording.json").read_text())
        (recorded.folder / "recording.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "flops"}))

    text = [part.text for part in compiled(Stored(copy)) if isinstance(part, Text)][1]
    steps = len(Stored(copy).recording("compiled", dtype="autocast_bf16").source.card.recording.samples)

    assert text.count(f"crashed after {steps} steps with 3 recompiles of forward (moe/layers.py:3)") == 1  # of two
    assert ": AssertionError: a guard failed. A bug." in text and "/home" not in text
    assert "ms a step" in text  # of those that ended
    assert "/home" not in str(table_of(compiled, Stored(copy), "compiled-training").columns)
