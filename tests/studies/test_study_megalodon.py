"""The study of megalodon, run once on a CPU: its files, its tables, sentences that follow the rows."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from study_checks import check_files, check_follows, check_report

from quick_study import changed, first_text, table_of
from stepscope.studies.megalodon import recordings
from stepscope.studies.megalodon.recordings import SUMMARY, appended, chains, fusion, gemm_share, schedule
from stepscope.studies.megalodon.study import (
    STUDY,
    cache,
    different,
    fastest,
    meeting,
    memory,
    out_of_memory,
    precision,
)
from stepscope.studies.stored import Recorded, Stored
from trace_builder import TraceBuilder

pytestmark = pytest.mark.long  # a quick study takes minutes; those of cs336 and nano run always

TRACES = Path(os.environ.get("STEPSCOPE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
FILES = (
    "reports/key_averages_short_fft_64_device_time.txt", "reports/key_averages_long_fft_64_memory.txt",
    "traces/short_fft_64/speed_step6.json.gz", "traces/long_fft_64/speed_step17.json.gz",
    "traces/long_fft_64/speed_step20.json.gz",
)  # fmt: skip


def test_every_question_is_answered(report):
    check_report(STUDY, report, missing=("chains",))  # a CPU launches no kernels


def test_every_file_is_there_and_says_something(report, stored):
    check_files(STUDY, report, stored)
    copy = stored.folder

    assert all((copy / name).stat().st_size > 100 for name in FILES)
    for name in FILES[-3:]:
        with gzip.open(copy / name, "rt") as stream:
            assert json.load(stream)["traceEvents"]
    rows = list(csv.DictReader((copy / "summary.csv").read_text().splitlines()))
    assert tuple(rows[0]) == SUMMARY
    assert [row["ms_per_step"] for row in rows].count("oom") == 1
    assert float(rows[-3]["ms_per_step"]) > 0 and float(rows[-3]["peak_mem_gb"]) > 0  # bf16, after it


def test_no_sentence_is_canned(stored, tmp_path):
    check_follows(STUDY, stored, tmp_path / "other", fixed=(
        "Are the three paths different, and do they give the same?",  # it tells proofs: below
        "What happens to the rest when one point runs out of memory?",  # it tells statuses: below
        "Which spans of the host are candidates for fusion?",  # it tells one trace: below
    ))  # fmt: skip


def test_points_that_failed_are_counted_from_the_rows(stored, studied, tmp_path):
    def crash(row):
        if row["config"]["seq_len"] == 64:
            row.update(status="crashed", reason="it fell over")

    assert "1 of 7 points ran out of memory, and 2 of the 4" in first_text(out_of_memory, stored)
    copy = changed(studied, tmp_path / "copy", "steps", crash)
    assert "and 1 of the 4 points after it have a time" in first_text(out_of_memory, copy)


def test_the_summary_is_added_to_and_never_erased(tmp_path):
    path = tmp_path / "s.csv"

    def write(*values):
        path.write_text(appended(path, "\n".join(["a", *values])))
        return path.read_text()

    assert write("oom", "oom") == "a\noom\noom\n"  # rows that are alike are as many lines
    assert write("oom") == "a\noom\noom\n"
    assert write("oom", "7.0") == "a\noom\noom\n7.0\n"


def test_the_fastest_path_follows_the_rows(studied, tmp_path):
    def sequential_wins(row):
        fast = row["config"]["ema"] == "sequential"
        row["samples_device_ns"] = row["samples_host_ns"] = [1_000 if fast else 4_000_000] * 3
        row["config"]["seq_len"] = 16

    stored = changed(studied, tmp_path / "changed", "paths", sequential_wins)
    assert first_text(fastest, stored).startswith("sequential is the fastest path in the model at 16 tokens")


@pytest.mark.parametrize(
    ("short_ns", "busy_share", "told"),
    [
        (400, None, "from 8 tokens, the shortest, on"),
        (900, None, "from 8 tokens, the shortest, on"),
        (900, 0.05, "from 64 tokens on"),
        (4000, None, "from about 18 tokens on"),
    ],
)
def test_a_path_is_faster_from_where_it_is_so_beyond_noise(short_ns, busy_share, told):
    def rows(variant, times):
        return [
            {"variant": variant, "seq_len": length, "num_samples": 10, "gpu_busy_share": busy_share}
            | {f"time_{name}_ns": ns for name in ("median", "ci_low", "ci_high")}
            for length, ns in times.items()
        ]

    slow, fast = rows("sequential", {8: 1000, 64: 9000}), rows("fft", {8: short_ns, 64: 1000})
    found = meeting(slow, fast)
    assert found == {"faster": "fft", "than": "sequential", "from": told, "longest": 64, "times_faster": 9.0}
    assert meeting(slow, rows("fft", {8: 1000, 64: 9000}))["from"] == "nowhere beyond noise"
    assert meeting(slow, rows("fft", {7: 1000})) == {}


def test_a_path_without_proof_is_counted_as_one(stored, studied, tmp_path):
    def unproven(row):
        if row["config"]["ema"] == "sequential":
            row["proofs"]["ema=sequential"] = None

    assert first_text(different, stored).startswith("23 of 23 rows prove")
    copy = changed(studied, tmp_path / "changed", "paths", unproven)
    assert first_text(different, copy).startswith("21 of 23 rows prove")
    assert set(table_of(different, stored, "proofs")["checked_at"]) == {
        "200 tokens × 2, width 16", "80 tokens × 2, width 64"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("off_ns", "times", "beyond"),
    [
        ([2_000_000] * 6, "0.50", "at 512 tokens"),
        ([980_000] * 6, "1.02", "at 512 tokens"),
        ([995_000] * 6, "1.01", "at no length"),
        ([900_000] * 3 + [1_600_000] * 3, "0.80", "at no length"),
    ],
)
def test_what_reduction_changes_is_told_beside_the_published_figure(studied, tmp_path, off_ns, times, beyond):
    def measured(row):
        row["config"]["seq_len"] = 512 if row["config"]["seq_len"] == 16 else row["config"]["seq_len"]
        if row["run"]["dtype"] == "bf16":
            row.update(status="ok", reason=None, loss=5.5, peak_allocated_bytes=1000, num_tokens=64, num_parameters=9)
            is_off = row["run"]["bf16_reduction"] == "off"
            row["samples_device_ns"] = row["samples_host_ns"] = off_ns if is_off else [1_000_000] * 6

    stored = changed(studied, tmp_path / "changed", "steps", measured)
    facts = json.loads((stored.folder / "study.json").read_text())
    (stored.folder / "study.json").write_text(json.dumps(facts | {"mode": "full"}))
    stored = Stored(stored.folder)

    text = first_text(precision, stored)
    assert text.startswith("At 512 tokens bf16 is")
    assert f"makes a step take {times} times as long, beyond noise {beyond}." in text
    assert table_of(precision, stored, "published-off_over_on")["published_off_over_on"] == [1.25]


def test_products_bound_what_reduction_can_bring():
    work = pl.DataFrame({"total_ns": [800], "gemm_ns": [500]})
    account = SimpleNamespace(gemm_share=work, steps=SimpleNamespace(height=1))
    summary = SimpleNamespace(step_ns=SimpleNamespace(median=1000))
    source = SimpleNamespace(analysis=SimpleNamespace(ranks=[account]), summary=summary)
    stored = SimpleNamespace(recordings=lambda _: [SimpleNamespace(axes={"seq_len": 512}, source=source)])

    (found,) = gemm_share.rows(stored)
    assert (found["step_share"], found["speedup_if_free"], found["published_speedup"]) == (0.5, 2.0, 1.25)


def test_the_answer_follows_the_memory(stored, studied, tmp_path):
    def square(row):
        row["peak_allocated_bytes"] = 5 * row["config"]["seq_len"] ** 2

    text = first_text(memory, changed(studied, tmp_path / "square", "steps", square))
    assert text.startswith("The peak of a step (fp32) grows quadratically (5.0 B per token pair; pairs are 100.0 %")
    assert text != first_text(memory, stored)


def without_state(row):
    """The rows by scan, as if they were by fft without its last state."""
    config = row["config"]
    if config["path"] == "scan":
        config.update(path="fft", last_state=False)
        row["samples_device_ns"] = row["samples_host_ns"] = [1_000] * 6


def test_fft_is_held_against_the_model_without_the_state_that_the_model_does_not_compute(stored, studied, tmp_path):
    part = table_of(fastest, stored, "part")
    used = list(zip(part["path"], part["seq_len"], part["mode"]))
    assert ("fft", 64, "forward") in used and ("fft with its last state", 64, "forward") not in used
    assert ("fft with its last state", 16, "forward") in used
    crossings = table_of(fastest, stored, "crossings")
    assert "fft with its last state" in {*crossings["faster"], *crossings["than"]}

    part = table_of(fastest, changed(studied, tmp_path / "without", "average", without_state), "part")
    assert "fft with its last state" not in part["path"]
    assert {ns for path, ns in zip(part["path"], part["alone_ns"]) if path == "fft"} == {1_000}


def test_another_size_alone_is_not_taken_for_that_of_the_model(studied, tmp_path):
    def other_size(row):
        if row["config"]["seq_len"] == 16:
            row["config"].update(seq_len=64, width=1024)
            row["samples_device_ns"] = row["samples_host_ns"] = [50_000_000_000] * 6

    stored = changed(studied, tmp_path / "sizes", "average", other_size)
    assert set(table_of(fastest, stored, "average-larger")["width"]) == {1024}
    assert max(table_of(fastest, stored, "average")["time_median_ns"]) < 10_000_000_000
    assert max(table_of(fastest, stored, "part")["alone_ns"]) < 10_000_000_000


@pytest.mark.parametrize(
    ("long_ns", "told"), [(10_000_000, "10.00 times as fast as"), (1_005_000, "not measurably different from")]
)
def test_what_the_cache_brings_follows_the_rows(studied, tmp_path, long_ns, told):
    def times(row):
        again_ns = {32: 1_100_000, 128: long_ns}[row["config"]["seq_len"]]
        ns = 1_000_000 if row["config"]["cache"] == "on" else again_ns
        row["samples_device_ns"] = row["samples_host_ns"] = [ns] * 6

    text = first_text(cache, changed(studied, tmp_path / "paid", "decode", times))
    assert text.startswith("After 128 tokens the next token takes 1.00 ms") and f"{told} recomputing" in text


def test_every_cycle_came_and_one_that_did_not_would_be_told(stored, studied, tmp_path):
    assert first_text(schedule, stored).startswith("5 of 5 steps were traced, in 3 of 3 windows")
    shutil.copytree(studied, tmp_path / "cut")
    (path,) = (tmp_path / "cut/long/recordings").glob("*/recording.json")
    facts = json.loads(path.read_text())
    del facts["trace"]["repeated"]
    path.write_text(json.dumps(facts))

    assert first_text(schedule, Stored(tmp_path / "cut")).startswith("3 of 5 steps were traced, in 2 of 3 windows")
    columns = table_of(schedule, stored, "playbook-schedules")
    last = {name: values[-1] for name, values in columns.items()}
    assert (last["repeat"], last["num_run"], last["num_needed"], last["num_whole_cycles"]) == (2, 11, 16, 1)


def test_a_span_that_keeps_the_host_longer_than_the_gpu_is_a_candidate(tmp_path, monkeypatch):
    trace = TraceBuilder()
    for number, start in enumerate((0, 1000)):
        trace.step(number, start, 900).annotation("stepscope.phase/forward", start, 800)
        trace.annotation("stepscope.module/blocks.0.norm", start + 10, 200)
        for at in range(start + 20, start + 200, 30):
            trace.op("aten::mul", at, 20).launch("small", at + 5, (at + 12, 2), took=4)
        trace.annotation("stepscope.module/head", start + 300, 40).op("aten::mm", start + 310, 20)
        trace.launch("gemm", start + 315, (start + 330, 400), took=4)
    one = Recorded({"seq_len": 7}, "ok", None, trace.write(tmp_path / "trace.json.gz"))
    monkeypatch.setattr(recordings, "longest", lambda stored: one)
    (tmp_path / "study.json").write_text('{"study": "megalodon"}')

    stored = Stored(tmp_path)
    text = first_text(fusion, stored)
    assert text.startswith("1 of 2 spans keep the host busy longer than the GPU")
    assert "the forward of blocks.*.norm (200 µs to launch 12.0 µs of work); head has 97.1 % of the GPU work" in text
    found = table_of(fusion, stored, "spans")
    assert dict(zip(found["module"], found["num_ops"]))["blocks.*.norm"] == 6


@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not here: set STEPSCOPE_TRACES to their folder")
def test_chains_of_a_gpu_trace_say_what_they_could_save(tmp_path, monkeypatch):
    trace = tmp_path / "trace.json.gz"
    shutil.copyfile(TRACES / "h200" / "gpt2_eager.json.gz", trace)
    monkeypatch.setattr(recordings, "longest", lambda stored: Recorded({}, "ok", None, trace))
    found = chains.rows(None)

    assert found and all(row["fused_bytes"] < row["bytes"] for row in found)
    assert sum(row["num_kernels"] - row["num_chains"] for row in found) > 0
