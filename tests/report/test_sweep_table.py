"""The table of a sweep: fits the terminal, says units, failures, marks, and what it leaves out."""

from __future__ import annotations

import csv
import io
import re

import pytest

from stepscope.analysis.comparison.sweeps import sweep_json, sweep_of
from stepscope.document.model import Table
from stepscope.document.sweep_table import grid_document, records_table, row_line, sweep_document
from stepscope.render.csv import csv_of
from stepscope.render.markdown.markdown import markdown_of
from stepscope.render.terminal import terminal_text

RUN = {
    "mode": "step", "dtype": "bf16", "bf16_reduction": "auto", "compile": "off", "sdpa": "free",
    "optimizer": "adamw", "warmup": 3, "steps": 3, "seed": 0, "device": "cuda",
}  # fmt: skip


def row(number, samples, variant, status="ok", reason=None):
    figures = {
        "samples_device_ns": samples,
        "samples_host_ns": samples,
        "num_tokens": 4096,
        "num_parameters": 128_600_000,
        "flops_formula": 10**12,
        "flops_counted_by_dtype": {"bf16": 10**12},
        "peak_allocated_bytes": 3 << 30,
        "loss": 9.21034,
        "environment_hash": "e",
    }
    return {
        "hash": f"hash{number}", "workload": "cs336", "preset": "small",
        "config": {"attention": variant, "seq_len": 128}, "run": RUN, "status": status, "reason": reason,
        "reference": {"attention": "naive"}, **(figures if samples else {}),
    }  # fmt: skip


ROWS = [
    row(1, [57_000_000, 57_600_000, 58_000_000], "naive"),
    row(2, [20_000_000, 20_010_000, 20_020_000], "sdpa"),
    row(3, None, "flash", "oom", "asked for 20.00 GiB where 1.50 GiB of 139.72 GiB was free | \x1b[31m"),
]
SWEEP = sweep_of(ROWS, {"e": {"device_name": "NVIDIA H200"}})


def sweep_text(sweep, width):
    return terminal_text(sweep_document(sweep), width)


def sweep_csv(sweep):
    return csv_of(records_table(sweep))


def flat(text):
    return " ".join(text.split())


def test_the_table_has_units_marks_and_every_row():
    text = sweep_text(SWEEP, 160)

    titles = next(line for line in text.splitlines() if "time ms" in line)
    assert flat(titles) == "attention time ms status tokens/s × plainest peak MFU p10–p90 ms loss TFLOP/s"
    assert "20.010*" in text and "2.88" in text and "3.00 GiB" in text and "205,000" in text
    assert "oom" in text and "asked for 20.00 GiB where 1.50 GiB of 139.72 GiB was free" in flat(text)
    assert "\x1b" not in text
    assert "3 points: 2 ok, 1 oom" in text and "128,600,000 parameters" in text and "seq_len=128" in text
    assert "bf16 989.4 TFLOP/s, dense peak of NVIDIA H200" in text


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_it_fits_the_terminal_and_says_what_it_leaves_out(width):
    text = sweep_text(SWEEP, width)

    assert max(map(len, text.splitlines())) <= width
    assert ("Too narrow for" in text) == (width < 100)
    assert "time ms" in text


def test_markdown_has_the_command_the_reason_and_whole_rows():
    lines = markdown_of(sweep_document(SWEEP, "stepscope bench cs336")).splitlines()

    assert any("stepscope bench cs336" in line for line in lines)
    table = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1
    assert "20.010\\*" in table[3] and "| oom |" in table[4] and "asked for" in table[4]


def test_csv_has_every_axis_and_figure():
    records = list(csv.DictReader(io.StringIO(sweep_csv(SWEEP))))

    assert records[0]["attention"] == "naive" and records[0]["time_median_ns"] == "57600000"
    assert records[1]["is_best"] == "True" and float(records[1]["mfu_share"]) == pytest.approx(0.0505, abs=1e-4)
    assert records[2]["status"] == "oom" and records[2]["time_median_ns"] == ""


def test_one_row_and_no_axis_is_a_table_too():
    text = sweep_text(sweep_of(ROWS[:1], {}), 80)
    assert "57.6" in text and "1 point: 1 ok" in text
    assert "asked for 20.00 GiB" in sweep_text(sweep_of(ROWS[2:], {}), 80)


def test_a_loss_that_is_no_number_is_marked_and_every_note_is_said():
    rows = [
        {**row(1, [57_000_000] * 6, "naive"), "loss": None, "notes": ["the loss is nan"]},
        {**row(2, [20_000_000] * 6, "sdpa"), "notes": ["the final loss is inf", "FLOPs were not counted: why"]},
    ]
    sweep = sweep_of(rows, {})

    text = sweep_text(sweep, 160)
    for said in (text, markdown_of(sweep_document(sweep))):
        assert "the loss is nan" in said and "FLOPs were not counted: why" in said and "row 1" in said
    assert [record["notes"] for record in csv.DictReader(io.StringIO(sweep_csv(sweep)))] == [
        "the loss is nan",
        "the final loss is inf; FLOPs were not counted: why",
    ]
    assert sweep_json(sweep)["points"][0]["notes"] == "the loss is nan"
    assert "row 1" not in sweep_text(SWEEP, 160)


def test_what_is_dropped_and_what_differs_is_said():
    dropping = {**row(2, [20_000_000] * 6, "sdpa"), "facts": {"dropped_share": 0.125, "dropped_flops": 9.0}}
    text = sweep_text(sweep_of([row(1, [57_000_000] * 6, "naive"), dropping], {}), 160)

    assert "12.5 %" in text and "2.85≠" in text and "dropped_flops" not in text and "20.000*" not in text
    assert "some dropped against none dropped" in text


def test_the_median_lies_within_the_printed_spread():
    samples = [21_150_000, 21_190_000, 21_240_000, 24_000_000, 25_600_000, 21_210_000, 25_400_000]
    text = sweep_text(sweep_of([row(1, samples, "naive")], {}), 160)
    line = next(line for line in text.splitlines() if re.search(r"\d–\d", line))
    median, spread = line.split()[0], next(word for word in line.split() if "–" in word)

    low, high = map(float, spread.split("–"))
    assert low <= float(median.rstrip("~")) <= high


def test_few_samples_are_said_to_be_too_few_for_ties():
    assert "Fewer than 6 samples" in sweep_text(SWEEP, 160)
    many = sweep_of([row(1, [57_000_000] * 6, "naive"), row(2, [20_000_000] * 6, "sdpa")], {})
    assert "Fewer than" not in sweep_text(many, 160)


def test_a_finished_row_in_one_line():
    assert row_line(ROWS[0], ["attention"]) == "ok       attention=naive  57.60 ms"
    assert row_line(ROWS[2], ["attention"]).startswith("oom      attention=flash  asked for")


def test_points_of_a_grid():
    points = [{"workload": "w", "preset": "p", "config": {"a": a}, "run": {"mode": "step"}} for a in (1, 2)]
    text = flat(terminal_text(grid_document(points), 80))
    assert "2 points" in text and "a 1 2" in text and "w, preset=p, mode=step" in text


def test_a_row_says_how_busy_the_gpu_was_and_never_more_than_all_of_the_time():
    busy = {0: 25_000_000, 1: 101_000_000, 2: None}
    rows = [row(number, [100_000_000] * 7, "sdpa") | {"gpu_busy_ns": ns} for number, ns in busy.items()]
    sweep = sweep_of(rows, {})
    assert [point["gpu_busy_share"] for point in sweep_json(sweep)["points"]] == [0.25, 1.0, None]
    text = sweep_text(sweep, 200)
    assert "GPU busy" in text and "25.0 %" in text


def test_what_is_said_beside_a_preset_is_a_column():
    pairs = [("tiny", 16, 2), ("small", 32, 4)]
    points = [
        {"workload": "cs336", "preset": preset, "config": {"seq_len": length, "layers": layers}, "run": RUN}
        for preset, length, layers in pairs
    ]
    assert grid_document(points).parts(Table)[0].columns == {"preset": ["tiny", "small"], "seq_len": ["16", "32"]}


def test_the_line_of_a_row_has_the_median_of_the_table():
    assert "57.50" in row_line(row(1, [57_000_000, 58_000_000], "naive"), ["attention"])
