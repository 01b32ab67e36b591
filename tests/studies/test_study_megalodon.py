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

from quick_study import canned, changed, first_text
from stepscope.document.model import Table, Text
from stepscope.studies.megalodon import answers as megalodon_answers
from stepscope.studies.megalodon import paths as megalodon_paths
from stepscope.studies.megalodon import recordings as megalodon_recordings
from stepscope.studies.megalodon.files import SUMMARY
from stepscope.studies.megalodon.study import STUDY
from stepscope.studies.outputs import appended
from stepscope.studies.stored import Recorded, Stored
from trace_builder import TraceBuilder

ROOT = Path(__file__).parents[2]
TRACES = Path(os.environ.get("STEPSCOPE_TRACES", ROOT.parent / "shared" / "traces"))
FILES = (
    "summary.csv", "reports/ms_per_step.txt", "reports/peak_mem_gb.txt", "report/report.html", "report/report.md",
    "reports/key_averages_short_fft_64_device_time.txt", "reports/key_averages_short_fft_64_memory.txt",
    "reports/key_averages_long_fft_64_device_time.txt", "reports/key_averages_long_fft_64_memory.txt",
    "traces/short_fft_64/speed_step6.json.gz", "traces/long_fft_64/speed_step17.json.gz",
    "traces/long_fft_64/speed_step20.json.gz",
)  # fmt: skip


def test_every_file_is_there_and_says_something(studied):
    sizes = {name: (studied / name).stat().st_size for name in FILES}

    assert all(size > 100 for size in sizes.values()), sizes
    for name in FILES[-3:]:
        with gzip.open(studied / name, "rt") as stream:
            assert json.load(stream)["traceEvents"]


def test_no_table_has_an_empty_column_and_every_question_an_answer(report):
    tables = report.parts(Table)

    assert {"proofs", "average", "paths", "part", "steps", "growth", "decode", "windows", "spans"} <= {
        table.id for table in tables
    }
    for table in tables:
        for name, values in table.columns.items():
            assert any(value not in (None, "") for value in values), f"{table.id}.{name} is empty"
    for section in report.sections[1:-1]:
        assert isinstance(section.parts[0], Text), section.title


def test_no_sentence_is_canned(stored, tmp_path):
    assert canned(STUDY, stored, tmp_path / "other") == [
        "What happens to the rest when one point runs out of memory?",  # it tells statuses: below
        "Which spans of the host are candidates for fusion?",  # it tells one trace: below
    ]


def test_a_point_that_ran_out_of_memory_is_a_row_and_not_the_end(studied):
    rows = list(csv.DictReader((studied / "summary.csv").read_text().splitlines()))

    assert tuple(rows[0]) == SUMMARY
    assert [row["ms_per_step"] for row in rows].count("oom") == 1
    assert float(rows[-3]["ms_per_step"]) > 0 and float(rows[-3]["peak_mem_gb"]) > 0  # bf16, after it
    assert "1 point of 7 ran out of memory" in first_text(megalodon_answers.out_of_memory, Stored(studied))


def test_points_that_failed_are_counted_from_the_rows(studied, tmp_path):
    def crash(row):
        if row["config"]["seq_len"] == 128:
            row.update(status="crashed", reason="it fell over")

    text = first_text(megalodon_answers.out_of_memory, changed(studied, tmp_path / "copy", "steps", crash))

    assert "1 of the 4 points after it have a time" in text


def test_the_summary_is_added_to_and_never_erased(studied, tmp_path):
    def slower(row):
        if row["config"]["seq_len"] == 128:
            row["samples_device_ns"] = [7_000_000] * 3
            row["samples_host_ns"] = [7_000_000] * 3

    before = (studied / "summary.csv").read_text()
    content = STUDY.files["summary.csv"]

    assert content(Stored(studied)) == before  # the same rows again add nothing
    after = content(changed(studied, tmp_path / "again", "steps", slower))
    assert after.startswith(before) and after[len(before) :].startswith("fp32,auto,128,2,7.0,")


def test_rows_that_are_alike_are_as_many_lines(tmp_path):
    (tmp_path / "study.json").write_text('{"study": "x"}')
    stored = Stored(tmp_path)

    def content(*values):
        return appended("s.csv", lambda _: Table("s", "", {"a": list(values)}))(stored)

    (tmp_path / "s.csv").write_text(content("oom", "oom"))
    assert (tmp_path / "s.csv").read_text() == "a\noom\noom\n"
    assert content("oom") == "a\noom\noom\n" and content("oom", "oom", "oom") == "a\noom\noom\noom\n"


def test_the_cross_over_follows_the_rows(studied, tmp_path):
    def sequential_wins(row):
        fast = row["config"]["ema"] == "sequential"
        row["samples_device_ns"] = row["samples_host_ns"] = [1_000 if fast else 4_000_000] * 3

    stored = changed(studied, tmp_path / "changed", "paths", sequential_wins)
    before, text = (
        " ".join(part.text for part in megalodon_paths.fastest(each) if isinstance(part, Text))
        for each in (Stored(studied), stored)
    )
    assert "sequential is the fastest path at 128 tokens" in text
    assert (
        "in the model, forward and forward+backward, sequential is faster than fft from 32 tokens, the shortest, on"
    ) in text
    assert text != before


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
    (found,) = megalodon_paths._meeting(slow, fast)
    assert found == {"faster": "fft", "than": "sequential", "from": told, "longest": 64, "times_faster": 9.0}
    (equal,) = megalodon_paths._meeting(slow, rows("fft", {8: 1000, 64: 9000}))
    assert equal["from"] == "nowhere beyond noise"


def test_a_path_without_proof_is_counted_as_one(studied, tmp_path):
    def unproven(row):
        if row["config"]["ema"] == "sequential":
            row["proofs"]["ema=sequential"] = None

    before, after = (
        first_text(megalodon_paths.different, stored)
        for stored in (Stored(studied), changed(studied, tmp_path / "changed", "paths", unproven))
    )
    assert before.startswith("31 of 31 rows prove") and after.startswith("27 of 31 rows prove")


@pytest.mark.parametrize(
    ("off_ns", "times", "beyond"),
    [
        ([2_000_000] * 6, "0.50", "at 512 tokens (2.00 times as fast as without)"),
        ([980_000] * 6, "1.02", "at 512 tokens (1.02 times slower than without)"),
        ([995_000] * 6, "1.01", "at none of them"),
        ([900_000] * 3 + [1_600_000] * 3, "0.80", "at none of them"),
    ],
)
def test_what_reduction_changes_is_told_beside_the_published_figure(studied, tmp_path, off_ns, times, beyond):
    def measured(row):
        if row["run"]["dtype"] == "bf16":
            row.update(status="ok", reason=None, loss=5.5, peak_allocated_bytes=1000, num_tokens=64, num_parameters=9)
            is_off = row["run"]["bf16_reduction"] == "off"
            row["samples_device_ns"] = row["samples_host_ns"] = off_ns if is_off else [1_000_000] * 6
            row["config"]["seq_len"] = 512

    stored = changed(studied, tmp_path / "changed", "steps", measured)
    parts = list(megalodon_answers.precision(changed_lengths(stored)))

    told = f"With reduction in bf16 a step at 512 tokens takes {times} times as long as without; beyond noise: "
    assert f"{told}{beyond}." in parts[0].text
    beside = next(part for part in parts if isinstance(part, Table) and part.id.startswith("published"))
    assert list(beside.columns["published_off_over_on"]) == [1.25]
    assert "At 512 tokens a step in fp32 takes " in parts[0].text and "a loss of 5.50 ± 0.02." in parts[0].text


@pytest.mark.parametrize(("gemm_ns", "is_more"), [(10, True), (500, False)])
def test_a_published_gain_is_held_against_what_the_products_take(gemm_ns, is_more):
    work = pl.DataFrame({"total_ns": [800], "gemm_ns": [gemm_ns]})
    account = SimpleNamespace(gemm_share=work, steps=SimpleNamespace(height=1))
    summary = SimpleNamespace(step_ns=SimpleNamespace(median=1000))
    source = SimpleNamespace(analysis=SimpleNamespace(ranks=[account]), card=SimpleNamespace(summary=summary))
    one = SimpleNamespace(status="ok", axes={"seq_len": 512}, source=source)
    stored = SimpleNamespace(recordings=lambda measure: [one])

    (found,) = megalodon_recordings.gemm_share(stored, {512: 1.25})
    assert ("The playbook's 1.25 times at this length is more than that" in found.text) == is_more


def changed_lengths(stored: Stored) -> Stored:
    """fp32 at 512 tokens too, so that there is something to hold bf16 against."""
    path = stored.folder / "steps" / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["config"]["seq_len"] = 512
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Stored(stored.folder)


def test_the_answer_follows_the_memory(studied, tmp_path):
    def square(row):
        row["peak_allocated_bytes"] = 5 * row["config"]["seq_len"] ** 2

    before, after = (
        first_text(megalodon_answers.memory, stored)
        for stored in (Stored(studied), changed(studied, tmp_path / "square", "steps", square))
    )
    assert after.startswith("The peak of a step (fp32) grows quadratically: 5.0 B for each pair of tokens; at 128")
    num_linear, num_peaks = (int(after.split(" peaks over three")[0].split()[at]) for at in (-3, -1))
    assert f"{num_linear + 1} of {num_peaks} peaks over three lengths or more have nothing for pairs" in before


def without_state(row):
    """The rows by scan, as if they were by fft without its last state."""
    config = row["config"]
    if config["path"] == "scan":
        config.update(path="fft", last_state=False)
        row["samples_device_ns"] = row["samples_host_ns"] = [1_000] * 6


def part_of(stored):
    parts = list(megalodon_paths.fastest(stored))
    text = " ".join(part.text for part in parts if isinstance(part, Text))
    return text, {part.id: part.columns for part in parts if isinstance(part, Table)}


def test_fft_is_held_against_the_model_without_the_state_that_the_model_does_not_compute(studied, tmp_path):
    before, tables = part_of(Stored(studied))
    assert "fft with its last state is faster than sequential" in before
    assert "stands beside them with it (not every length has fft without) in forward and forward+backward." in before
    used = list(zip(tables["part"]["path"], tables["part"]["seq_len"], tables["part"]["mode"]))
    assert ("fft", 128, "forward") in used and ("fft with its last state", 128, "forward") not in used
    assert ("fft with its last state", 32, "forward") in used and "3 rows of fft are with the state" in before

    after, tables = part_of(changed(studied, tmp_path / "without", "average", without_state))
    assert "stands beside them without it in forward and forward+backward." in after
    assert "with its last state" not in tables["part"]["path"] and "of fft are with the state" not in after
    assert {ns for path, ns in zip(tables["part"]["path"], tables["part"]["alone_ns"]) if path == "fft"} == {1_000}


def test_the_kernels_show_whether_the_model_computes_the_state(studied, tmp_path):
    numbers = {("fft", True): 94, ("fft", False): 57, ("scan", True): 16}

    def counted(row):
        row["num_kernels"] = numbers.get((row["config"]["path"], row["config"]["last_state"]))

    def counted_in_model(row):
        row["num_kernels"] = {"fft": 284, "scan": 200}.get(row["config"]["ema"])

    stored = changed(studied, tmp_path / "alone", "average", counted)
    stored = changed(stored.folder, tmp_path / "both", "paths", counted_in_model)

    assert (
        "a forward of 128 tokens by fft has 42 more than by scan in each layer of the model, alone 41 without the "
        "state and 78 with it."
    ) in part_of(stored)[0]
    assert "The kernels show it" not in part_of(Stored(studied))[0]


def test_sizes_of_the_check_stand_beside_what_it_found(studied):
    text = first_text(megalodon_paths.different, Stored(studied))

    assert "alone at 200 tokens × 2, width 16; in the model at 80 tokens × 2, width 64." in text


@pytest.mark.parametrize(
    ("long_ns", "told"),
    [
        (10_000_000, "It pays (2 times or more) from 128 tokens on; at 32 it brings little or nothing."),
        (1_100_000, "At none of 32 and 128 tokens does that pay (2 times or more)."),
    ],
)
def test_from_which_length_the_cache_pays_follows_the_rows(studied, tmp_path, long_ns, told):
    def times(row):
        again_ns = {32: 1_100_000, 128: long_ns}[row["config"]["seq_len"]]
        ns = 1_000_000 if row["config"]["cache"] == "on" else again_ns
        row["samples_device_ns"] = row["samples_host_ns"] = [ns] * 6

    text = first_text(megalodon_answers.cache, changed(studied, tmp_path / "paid", "decode", times))

    assert told in text and "After 32 tokens it takes 1.00 ms (" in text and "the GPU's work" not in text


def test_rows_that_compute_the_same_show_how_far_the_host_sets_them_apart(studied, tmp_path):
    def waits(row):
        is_short = row["config"]["seq_len"] == 32
        slow = is_short and row["config"]["ema"] == "scan"
        row["samples_device_ns"] = row["samples_host_ns"] = [3_000_000 if slow else 1_000_000] * 6
        row["gpu_busy_ns"] = 100_000

    text = first_text(megalodon_answers.cache, changed(studied, tmp_path / "waits", "decode", waits))

    assert "yet scan takes 1.00 ms after 128 and 3.00 ms after 32, so that paths less than 3.00 times apart" in text
    assert "The GPU's work is 100 µs (fft), " in text


def test_the_peak_of_decoding_stands_beside_what_the_state_has(studied, tmp_path):
    def peaks(row):
        row["peak_allocated_bytes"] = row["config"]["seq_len"] << 20

    stored = changed(studied, tmp_path / "peaks", "decode", peaks)
    text = " ".join(part.text for part in megalodon_answers.cache(stored) if isinstance(part, Text))

    assert "the peak is 32.0 MiB after 32 tokens and 128 MiB after 128" in text
    assert "the state has keys and values of 31 of them" in text


def other_size(row):
    """What was measured of the shortest length, as if it were of the longest, and ten times as long as that takes."""
    if row["config"]["seq_len"] == 4:
        row["config"].update(seq_len=128, width=1024)
        is_fft = row["config"]["path"] == "fft"
        row["samples_device_ns"] = row["samples_host_ns"] = [50_000_000_000 if is_fft else 10_000_000_000] * 6


def test_another_size_alone_is_told_and_not_taken_for_that_of_the_model(studied, tmp_path):
    stored = changed(studied, tmp_path / "sizes", "average", other_size)
    parts = list(megalodon_paths.fastest(stored))
    text = " ".join(part.text for part in parts if isinstance(part, Text))

    assert (
        "Alone, 2 sequences of 128 tokens, width 1024, 4 states: scan is 5.00 times as fast as fft with its last "
        "state in forward and 5.00 times as fast as fft with its last state in forward+backward."
    ) in text
    tables = {part.id: part.columns for part in parts if isinstance(part, Table)}
    assert set(tables["average-larger"]["width"]) == {1024}
    assert max(tables["average"]["time_median_ns"]) < 10_000_000_000 > max(tables["part"]["alone_ns"])
    kept = [part.text for part in megalodon_answers.cache(stored) if isinstance(part, Text)][-1]
    assert kept.startswith("To keep the state") and " s " not in kept


@pytest.mark.parametrize(
    ("answer", "measure"),
    [
        (megalodon_paths.fastest, "average"),
        (megalodon_paths.fastest, "paths"),
        (megalodon_answers.precision, "steps"),
        (megalodon_answers.cache, "decode"),
    ],
)
def test_rows_in_which_the_gpu_waits_for_the_host_are_told(studied, tmp_path, answer, measure):
    def waits(row):
        if row.get("samples_device_ns"):
            row["gpu_busy_ns"] = int(sorted(row["samples_device_ns"])[1] * 0.25)

    before, after = (
        " ".join(part.text for part in Stored(folder).parts(answer) if isinstance(part, Text))
        for folder in (studied, changed(studied, tmp_path / "waits", measure, waits).folder)
    )
    assert "the GPU is busy for 25.0 % of the time: the host sets the pace there." in after
    assert "the host sets the pace" not in before


def test_every_cycle_came_and_one_that_did_not_would_be_told(studied, tmp_path):
    assert first_text(megalodon_recordings.schedule, Stored(studied)).startswith(
        "5 of the 5 steps that were to be traced were traced, in 3 of 3 windows."
    )
    shutil.copytree(studied, tmp_path / "cut")
    (path,) = (tmp_path / "cut/long/recordings").glob("*/recording.json")
    facts = json.loads(path.read_text())
    del facts["trace"]["repeated"]
    path.write_text(json.dumps(facts))

    text = first_text(megalodon_recordings.schedule, Stored(tmp_path / "cut"))
    assert text.startswith("3 of the 5 steps that were to be traced were traced, in 2 of 3 windows.")


def test_two_processes_say_nothing_of_two_schedules(studied):
    text = first_text(megalodon_recordings.schedule, Stored(studied))

    assert "by 3 steps of one process and " in text and "by 10 of another: two processes are " in text
    assert "Inside the longer one the first 3 clean steps have a median of " in text


def test_the_playbooks_loop_never_comes_to_its_second_cycle(studied):
    tables = [part for part in megalodon_recordings.schedule(Stored(studied)) if isinstance(part, Table)]
    columns = tables[-1].columns

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
    monkeypatch.setattr(megalodon_recordings, "_longest", lambda stored: one)
    parts = megalodon_recordings.fusion(Stored.__new__(Stored))

    text, spans = next(parts).text, next(parts)
    assert text == (
        "At 7 tokens, in a traced step, in which the profiler slows the host and not the GPU, the host takes longer "
        "than the GPU in 1 of 2 spans. Most in the forward of blocks.*.norm: 6 ops launch 6 kernels, 12.0 µs of work "
        "that takes the host 200 µs. The most GPU work is in head: 400 µs of 412 µs, 97.1 %."
    )
    assert "uncovered_ns" in spans.columns


@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not here: set STEPSCOPE_TRACES to their folder")
def test_chains_of_a_gpu_trace_say_what_they_could_save(tmp_path):
    trace = tmp_path / "trace.json.gz"
    shutil.copyfile(TRACES / "h200" / "gpt2_eager.json.gz", trace)
    one = Recorded({}, "ok", None, trace)
    found = megalodon_recordings._chain_rows(one)

    assert found and all(row["fused_bytes"] < row["bytes"] for row in found)
    num_saved = sum(row["num_kernels"] - row["num_chains"] for row in found)
    told = megalodon_recordings._saved(found, [{"num_kernels": 5000, "device_ns": 10**9}] * 2)
    assert told.startswith(f"One kernel for each chain would save {num_saved:,.0f} of 10,000 launches a step, but ")
