"""`stepscope analyze` as people call it: text and JSON of files, folders and recordings; a mistake is one line."""

from __future__ import annotations

import json
import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from analyze_verb import WIDTH, analyze, as_json, assert_mistake, training

from handmade import cpu_recording
from parametrized import parametrized
from trace_builder import PUBLIC, TraceBuilder, needs_traces

DOCS = Path(__file__).parents[2] / "docs" / "analyze.md"
RANK_KEYS = {
    "gpu_time",
    "idle_causes",
    "phases",
    "kernel_classes",
    "top_kernels",
    "num_kernel_launches_per_step",
    "modules",
    "copies",
    "unlinked",
}
GPU_TIME_KEYS = {
    "window_ns",
    "busy_ns",
    "idle_ns",
    "compute_ns",
    "communication_ns",
    "memory_ns",
    "exposed_communication_ns",
    "exposed_memory_ns",
}
EVIL = "evil\x1b[31m\x1b]0;title\x07\x9b2J\u202ename\r\n"


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    return training().write(tmp_path_factory.mktemp("analyze") / "trace.json.gz")


@pytest.fixture(scope="module")
def result(trace) -> dict[str, Any]:
    return as_json(trace)


@pytest.fixture(scope="module")
def text(trace) -> str:
    done = analyze(trace)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# -- what it prints ---------------------------------------------------------------------------------------------


def test_the_text_says_what_the_trace_is_and_where_its_time_goes(text):
    for words in (
        "trace.json.gz",
        "NVIDIA H200",
        "2 steps",
        "idle",
        "forward",
        "optimizer",
        "gemm_kernel",
        "aten::mm",
    ):
        assert words in text


def test_the_json_has_every_field_of_the_contract(result):
    assert result["schema_version"] == 1
    assert {"device", "ranks", "events", "steps", "warnings"} <= set(result["trace"])
    (rank,) = result["ranks"]
    assert set(rank) >= RANK_KEYS
    assert set(rank["gpu_time"]) >= GPU_TIME_KEYS


def test_the_json_and_its_documentation_have_the_same_fields(result):
    page = DOCS.read_text()
    whole, rank, _ = page.split("\n## ")
    documented = {name for row in re.findall(r"^\| (`.*?) \|", rank, re.M) for name in re.findall(r"`(\w+)`", row)}

    assert documented == set(result["ranks"][0])
    assert {name for row in re.findall(r"^\| (`.*?) \|", whole, re.M) for name in re.findall(r"`(\w+)`", row)} == set(
        result
    )


def keys_of(value: Any) -> set[str]:
    """Every key in an object, and in what it holds; device numbers are no names."""
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item)}
    if not isinstance(value, dict):
        return set()
    return {key for key in value if not key.isdecimal()} | {key for item in value.values() for key in keys_of(item)}


def test_every_key_of_the_json_is_documented(result, tmp_path):
    # GIVEN the JSON of one trace with all that a trace can have, and of several ranks with a collective in common
    trace = training().python("nn.Module: Net_0", 5, 60).memory(20, 512).call("cudaDeviceSynchronize", 60, 5)
    trace.kernel("other_device", 50, 5, device=1)
    everything = as_json(trace.write(tmp_path / "trace.json"))
    training().write(tmp_path / "rank0.json")
    training().kernel("ncclDevKernel_Broadcast", 900, 5).write(tmp_path / "rank1.json")
    together = as_json(tmp_path / "rank0.json", tmp_path / "rank1.json")

    assert together["across_ranks"]["unmatched_reasons"] and together["across_ranks"]["waits"]
    assert everything["ranks"][0]["memory"][0]["at_peak_by_op"]
    page = DOCS.read_text()
    found = keys_of(result) | keys_of(everything) | keys_of(together)
    assert len(found) > 100
    assert sorted(key for key in found if f"`{key}`" not in page) == []


@pytest.fixture(scope="module")
def eight_ranks() -> dict[str, Any]:
    return as_json(PUBLIC / "dlrm_8ranks_v100", "--no-cache")


@needs_traces
@pytest.mark.parametrize("name", ["dlrm_8ranks_v100", "qwen0.5b_h100_stacks.json.gz"])
def test_every_key_of_the_json_of_real_traces_is_documented(name, request):
    page = DOCS.read_text()
    is_folder = name == "dlrm_8ranks_v100"
    found = request.getfixturevalue("eight_ranks") if is_folder else as_json(PUBLIC / name, "--no-cache")

    assert sorted(key for key in keys_of(found) if f"`{key}`" not in page) == []
    if found["across_ranks"]:
        assert all(found["across_ranks"][part] for part in ("clocks", "stragglers", "waits", "collectives"))
    else:
        assert found["ranks"][0]["roofline"]["ops"] and found["ranks"][0]["memory"]


def test_the_figures_are_those_of_the_trace(result):
    (rank,) = result["ranks"]

    assert result["trace"]["device"] == "NVIDIA H200" and result["trace"]["steps"] == 2
    assert rank["gpu_time"] == {
        "window_ns": 345_000,
        "busy_ns": 190_000,
        "idle_ns": 155_000,
        "compute_ns": 160_000,
        "communication_ns": 40_000,
        "memory_ns": 10_000,
        "exposed_communication_ns": 20_000,
        "exposed_memory_ns": 10_000,
        "overlapped_communication_ns": 20_000,
    }
    assert [row["step"] for row in rank["steps"]] == [4, 5]
    assert sum(row["total_ns"] for row in rank["idle_causes"]) == rank["gpu_time"]["idle_ns"]
    assert rank["top_kernels"][0]["name"] == "void gemm_kernel<float>(int)"
    assert rank["num_kernel_launches_per_step"] == 3
    assert rank["launches"]["num_unlaunched_kernels"] == 2


def test_text_fits_a_hundred_columns(text):
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []


@needs_traces
@parametrized(
    "name",
    [
        "cpu_only_gloo",
        "event_sync_multi_stream_a100",
        "gpu_user_annotation_gp100",
        "mi250_minitoy_train_ROCm6_2_kineto",
        "qwen0.5b_mi300_stacks",
        "triton_mi300",
        "rank_non_gpu",
    ],
    quick=3,
)
def test_text_of_real_traces_fits_a_hundred_columns(name):
    done = analyze(PUBLIC / f"{name}.json.gz", "--no-cache")

    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if len(line) > WIDTH] == []


@needs_traces
def test_a_narrow_terminal_is_no_reason_to_fail():
    done = analyze(PUBLIC / "qwen0.5b_mi300_stacks.json.gz", "--no-cache", COLUMNS="40")

    assert (done.returncode, done.stderr) == (0, "")


def test_names_of_others_cannot_speak_to_the_terminal(tmp_path):
    # GIVEN escapes wherever a trace can carry a name
    trace = TraceBuilder(deviceProperties=[{"id": 0, "name": EVIL}]).step(1, 0, 400)
    trace.python(f"nn.Module: {EVIL}", 10, 80).op(EVIL, 20, 50).launch(EVIL, 30, (100, 50))
    trace.annotation(EVIL, 150, 50).op(EVIL, 160, 30).launch(EVIL + "2", 170, (250, 20)).slice(EVIL, EVIL, 1, 1)
    done = analyze(trace.write(tmp_path / "trace.json"))

    assert done.returncode == 0 and "evil" in done.stdout
    assert [c for c in done.stdout + done.stderr if not c.isprintable() and c != "\n"] == []


def test_a_file_whose_name_has_escapes_is_named_without_them(tmp_path):
    path = tmp_path / "evil\x1b[31mname.json"
    training().write(path)
    broken = tmp_path / "broken" / "evil\x1b[31mname.json"
    broken.parent.mkdir()
    broken.write_bytes(b"")

    for done in (analyze(path), analyze(broken.parent), analyze(tmp_path / "no\x1b[31mthing")):
        assert "\x1b" not in done.stdout + done.stderr


# -- options ----------------------------------------------------------------------------------------------------


def test_one_step_alone(trace, result):
    (rank,) = as_json(trace, "--step", "5")["ranks"]

    assert [row["step"] for row in rank["steps"]] == [5]
    assert rank["gpu_time"]["window_ns"] == 120_000
    assert sum(row["num_calls"] for row in rank["top_kernels"]) == 3


def test_a_step_that_is_not_there_is_one_line_with_those_that_are(trace):
    assert_mistake(analyze(trace, "--step", "7"), "no step 7", "4", "5")


def test_a_trace_of_one_step_has_no_range_of_them(tmp_path):
    path = TraceBuilder().step(10, 0, 50).op("aten::mm", 0, 5).write(tmp_path / "trace.json")

    assert_mistake(analyze(path, "--step", "11"), "no step 11; the trace has only step 10")


def test_a_trace_without_steps_says_so_when_asked_for_one(tmp_path):
    path = TraceBuilder().op("aten::mm", 0, 5).write(tmp_path / "trace.json")

    assert_mistake(analyze(path, "--step", "1"), "no step 1")


def test_top_is_how_long_lists_are(tmp_path):
    trace = TraceBuilder()
    for number in range(30):
        trace.op(f"op_{number}", 10 * number, 5).launch(f"kernel_{number}", 10 * number + 1, (1000 + 10 * number, 5))
    path = trace.write(tmp_path / "trace.json")

    (rank,) = as_json(path, "--top", "3")["ranks"]
    assert len(rank["top_kernels"]) == len(rank["ops"]) == 3
    (rank,) = as_json(path)["ranks"]
    assert len(rank["top_kernels"]) == len(rank["ops"]) == 30, "JSON has all rows"
    shown = analyze(path, "--top", "25").stdout
    assert sum(f"kernel_{number} " in shown for number in range(30)) >= 25


@pytest.mark.parametrize("number", ["0", "x", "1.5", ""])
def test_a_length_that_is_none_is_told_in_words(trace, number):
    assert_mistake(analyze(trace, "--top", number), f"argument --top: {number!r} must be a positive integer")


@pytest.mark.parametrize("words", [["--top", "0"], ["--top", "x"], ["--step", "x"], ["--rank", "x"], ["--no-such"]])
def test_options_that_make_no_sense_are_one_line(trace, words):
    assert_mistake(analyze(trace, *words), words[0])


def test_nothing_to_analyse_is_one_line():
    assert_mistake(analyze(), "no path", "stepscope run")


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A trace that is worth keeping."""
    trace = TraceBuilder().kernel("gemm", 0, 5)
    for number in range(25_000):
        trace.op("aten::add", 10 * number, 5)
    return trace.write(tmp_path_factory.mktemp("large") / "trace.json.gz")


def test_no_cache_writes_nothing_and_without_it_columns_are_kept(large, tmp_path):
    cache = tmp_path / "cache"
    first = as_json(large, "--no-cache", STEPSCOPE_CACHE=str(cache))
    assert not cache.exists()

    time.sleep(max(0.0, large.stat().st_ctime + 1.1 - time.time()))  # a trace that was just written is not kept
    second = as_json(large, STEPSCOPE_CACHE=str(cache))
    assert list(large.parent.iterdir()) == [large] and len(list(cache.glob("traces/*"))) == 1

    # AND what was kept gives the same answer
    assert as_json(large, STEPSCOPE_CACHE=str(cache)) == second == first


# -- folders and recordings -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for number in (0, 1, 10):
        trace = training()
        trace.kernel("extra", 1000, 10 + number).write(folder / f"rank{number}.json")
    return folder


def test_a_folder_is_its_ranks_in_order(ranks):
    found = as_json(ranks)

    assert found["trace"]["ranks"] == [rank["rank"] for rank in found["ranks"]] == [0, 1, 10]
    windows = [rank["gpu_time"]["window_ns"] for rank in found["ranks"]]
    assert [window - windows[0] for window in windows] == [0, 1_000, 10_000]


def test_several_paths_are_several_ranks(ranks):
    found = as_json(ranks / "rank1.json", ranks / "rank0.json", ranks / "rank1.json")

    assert found["trace"]["ranks"] == [0, 1]


def test_one_rank_of_many(ranks):
    found = as_json(ranks, "--rank", "10")

    assert [rank["rank"] for rank in found["ranks"]] == [10]
    assert found["ranks"][0]["file"].endswith("rank10.json")


def test_a_rank_that_is_not_there_is_one_line_with_those_that_are(ranks):
    assert_mistake(analyze(ranks, "--rank", "3"), "no rank 3", "0, 1, 10")


def test_the_text_of_many_ranks_has_them_side_by_side(ranks):
    done = analyze(ranks)

    assert done.returncode == 0
    assert re.search(r"^\s+10 ", done.stdout, re.M)
    assert [line for line in done.stdout.splitlines() if len(line) > WIDTH] == []


def test_a_rank_is_what_the_trace_says_rather_than_its_name(tmp_path):
    trace = training()
    trace.fields["distributedInfo"] = {"rank": 6, "world_size": 8}

    assert as_json(trace.write(tmp_path / "rank2.json"))["trace"]["ranks"] == [6]


def test_a_rank_is_chosen_by_what_the_traces_say(tmp_path):
    """GIVEN a folder whose names and traces disagree THEN --rank means what the traces say."""
    for name, rank in (("rank0.json", 1), ("rank1.json", 0)):
        trace = training()
        trace.fields["distributedInfo"] = {"rank": rank, "world_size": 2}
        trace.write(tmp_path / name)

    (found,) = as_json(tmp_path, "--rank", "0")["ranks"]
    assert found["rank"] == 0 and found["file"].endswith("rank1.json")


def test_two_windows_of_one_rank_are_one_line_that_names_both(tmp_path):
    training().write(tmp_path / "rank0_step10.json")
    training().write(tmp_path / "rank0_step20.json")

    assert_mistake(
        analyze(tmp_path), "rank0_step10.json and ", "rank0_step20.json are both of rank 0", "name one file"
    )


def test_two_traces_that_say_one_rank_after_their_events_are_told_too(tmp_path):
    events = json.dumps(training().events)
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(f'{{"traceEvents": {events}, "distributedInfo": {{"rank": 4}}}}')

    assert_mistake(analyze(tmp_path), "a.json and ", "b.json are both of rank 4")


@needs_traces
def test_the_eight_ranks_of_dlrm_have_their_exact_figures(eight_ranks):
    exact = json.loads((PUBLIC / "exact_gpu_time.json").read_text(), parse_float=Decimal)
    expected = {row["file"].removeprefix("dlrm_8ranks_v100/"): row for row in exact if row["file"].startswith("dlrm")}

    assert eight_ranks["trace"]["ranks"] == list(range(8))
    for rank in eight_ranks["ranks"]:
        row = expected.pop(Path(rank["file"]).name)
        for theirs, ours in (
            ("window_ms", "window_ns"),
            ("busy_ms", "busy_ns"),
            ("idle_ms", "idle_ns"),
            ("comp_ms", "compute_ns"),
            ("comm_ms", "communication_ns"),
            ("mem_ms", "memory_ns"),
            ("exposed_comm_ms", "exposed_communication_ns"),
            ("exposed_mem_ms", "exposed_memory_ns"),
        ):
            assert rank["gpu_time"][ours] == Decimal(row[theirs]) * 1_000_000, (rank["rank"], ours)
    assert expected == {}


def test_a_recording_is_analysed_by_its_trace(tmp_path):
    folder = cpu_recording(tmp_path / "run")
    training().write(folder / "trace" / "rank0.json.gz")

    found = as_json(folder)

    assert found["trace"]["ranks"] == [0] and found["trace"]["steps"] == 2
    assert found["ranks"][0]["file"].endswith("rank0.json.gz")


def test_a_recording_without_a_trace_is_one_line_with_what_records_one(tmp_path):
    assert_mistake(analyze(cpu_recording(tmp_path / "run")), "without a trace", "stepscope run")


def test_a_single_rank_is_the_same_by_itself_and_in_its_folder(ranks):
    alone = as_json(ranks / "rank1.json")["ranks"][0]
    together = as_json(ranks)["ranks"][1]

    assert {**alone, "rank": None} == {**together, "rank": None}
