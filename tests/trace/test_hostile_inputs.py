"""Damaged, crafted and huge inputs through the verbs: a sentence or an answer, in bounded time and memory."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import polars as pl
import pytest

from handmade import MS, cpu_recording, free_sample, gpu_recording, sample, write_recording
from memories import a_step, write_memory
from mutated_inputs import PAIRS, run_case, write_bases
from parametrized import parametrized
from stepscope.analysis.kernels.ops import modules
from stepscope.analysis.memory.size_formulas import formula
from stepscope.analysis.ranks.rank_account import gpu_time_by_device
from stepscope.analysis.structure.links import link
from stepscope.analysis.time.statistics import MOST_RESAMPLED, describe
from stepscope.analysis.time.step_times import slow_steps
from stepscope.analysis.time.summary import summary_of
from stepscope.trace.recording import read_recording
from trace_builder import TraceBuilder
from verbs import answers

TRACE_VERBS = ["show {}", "analyze {} --copies", "diagnose {} --json", "report {} -o {}.html",
               "export {} perfetto -o {}.p.json"]  # fmt: skip
RECORDING_VERBS = ["show {}", "diagnose {} --json", "report {} -o {}.html", "compare {} {}", "analyze {} --memory"]


# -- traces -------------------------------------------------------------------------------------------------------


@parametrized("verb", TRACE_VERBS, quick=3)
def test_two_kernels_and_no_host_are_a_trace(verb, tmp_path):
    trace = TraceBuilder().kernel("a", 10, 5000, correlation=1).kernel("b", 20_000, 5000, correlation=2)

    answers(verb, trace.write(tmp_path / "trace.json"))


@parametrized("dtypes", ["float", 3, {"a": 1}, ["float", 3], ["float", ["x"]], [None, None]], quick=2)
def test_dtypes_that_are_no_list_of_texts(dtypes, tmp_path):
    trace = TraceBuilder().step(1, 0, 4000).annotation("## forward ##", 0, 4000)
    for number in range(20):
        begin, facts = 200 * number, {"Input Dims": [[64, 64], [64, 64]], "Input type": dtypes}
        for depth, name in enumerate(("aten::to", "aten::_to_copy", "aten::copy_")):
            trace.op(name, begin + depth, 50 - 2 * depth, id=10 * number + depth + 1, **facts)
        trace.launch("void at::native::direct_copy_kernel_cuda", begin + 10, runs=(begin + 20, 100))

    answers("diagnose {} --json", trace.write(tmp_path / "trace.json"))


def test_an_id_that_all_events_share_multiplies_no_rows():
    trace = TraceBuilder()
    for number in range(500):
        trace.op("aten::mm", 10 * number, 5, id=5, sequence=5, forward_thread=number % 2)
        trace.call("cudaLaunchKernel", 10 * number + 1, 2, correlation=5, id=5)
        trace.kernel("gemm", 10 * number + 5, 3, correlation=5, id=5)
    read, heights, join = trace.read(), [], pl.DataFrame.join

    def counted(*args, **named):
        found = join(*args, **named)
        heights.append(found.height)
        return found

    with mock.patch.object(pl.DataFrame, "join", counted):
        linked = link(read)

    assert linked.device.height == 500 and linked.device["launch"].n_unique() == 1
    assert max(heights) <= 1500  # as many as there are events


def test_a_name_has_a_limit_that_can_be_raised(monkeypatch):
    trace = TraceBuilder().op("a" * 80_000, 0, 5).kernel("b" * 80_000, 10, 5)

    assert {len(name) for table in (trace.read().host, trace.read().device) for name in table["name"]} == {4097}
    monkeypatch.setenv("STEPSCOPE_MAX_NAME", "100000")
    assert len(trace.read().host["name"][0]) == 80_000


def test_thousands_of_devices_are_not_accounted_for_one_by_one(monkeypatch):
    trace = TraceBuilder()
    for number in range(100):
        trace.kernel("gemm", 10 * number, 5, device=number)
    account = trace.account()

    assert list(account.gpu_time_by_device) == list(range(64)) and "of 100 GPUs, only 64" in account.warnings[-1]
    assert account.gpu_time.busy_ns == 100 * 5000
    monkeypatch.setenv("STEPSCOPE_MAX_DEVICES", "500")
    assert len(gpu_time_by_device(trace.linked().device)) == 100


@pytest.mark.parametrize("is_named", [True, False])
def test_modules_in_modules_in_modules_are_bounded(is_named):
    trace, deep = TraceBuilder(), 3000
    for depth in range(deep):
        if is_named and depth % 50 == 0:
            trace.annotation("stepscope.module/" + ".".join(map(str, range(depth + 1))), depth, 9000 - 2 * depth)
        elif not is_named:
            trace.python(f"nn.Module: M{depth}_0", depth, 9000 - 2 * depth)
    trace.op("aten::mm", 3500, 100, id=1).launch("gemm", 3520, runs=(3600, 70), id=1)
    linked = trace.linked()
    table = modules(linked)

    names = linked.modules.calls["module"].cast(pl.String)
    assert int(names.str.count_matches(".", literal=True).max()) < 100
    assert int(names.str.len_chars().sum()) < 100 * 8 * deep  # not a megabyte for each
    assert table["device_self_ns"].sum() == 70_000


# -- recordings ---------------------------------------------------------------------------------------------------

DAMAGE = [
    {"flops": {"by_op": 3}},
    {"flops": {"by_op": [], "model_flops_by_dtype": {"fp32": "x"}}},
    {"environment": {"device_name": ["x"], "world_size": "two"}},
    {"environment": 7},
    {"parameters": {"num_total": 1e400}},
    {"trace": {"file": 3, "num_kernels": 4}},
    {"trace": {"file": "trace/rank0.json", "num_kernels": 4, "num_steps": 0}},
    {"steps": {"num_earlier": "x", "source": 4}},
    {"notes": [3]},
    {"between": {"evaluation": {"train.py:3": "often"}}},
    {"windows": {"warmup": None}},
    {"memory": {"peak_allocated_bytes": 5}},
    {"counters": {"other_processes": [{"used_bytes": {}}]}},
]


@parametrized("verb", RECORDING_VERBS, quick=30)
@pytest.mark.parametrize("facts", DAMAGE, ids=lambda facts: json.dumps(facts)[:40])
def test_a_damaged_field_costs_only_itself(verb, facts, tmp_path):
    folder = gpu_recording(tmp_path / "run")
    written = json.loads((folder / "recording.json").read_text())
    (folder / "recording.json").write_text(json.dumps(written | facts))

    answers(verb, folder)
    (name,) = facts
    assert f"recording.json: {name}" in answers("show {}", folder)


@pytest.mark.parametrize("status", ["\ud800", 3, None])
def test_a_recording_without_a_status_is_none(status, tmp_path):
    folder = gpu_recording(tmp_path / "run")
    written = json.loads((folder / "recording.json").read_text())
    (folder / "recording.json").write_text(json.dumps(written | {"status": status}))

    assert "is not a Stepscope recording: status is not a text" in answers("diagnose {}", folder)


@pytest.mark.parametrize("name", ["recording.json", "samples.jsonl", "counters.jsonl", "compile.json",
                                  "memory.json.gz", "trace/rank0.json", "snapshot.pickle"])  # fmt: skip
@pytest.mark.parametrize("what", ["pipe", "endless"])
def test_a_pipe_or_a_device_is_not_read(name, what, tmp_path):
    folder = cpu_recording(tmp_path / "run")
    (folder / "trace").mkdir()
    write_memory(folder / "memory.json.gz", a_step())
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if what == "pipe" else (folder / name).symlink_to("/dev/zero")

    for verb in RECORDING_VERBS[:2]:
        answers(verb, folder)
    answers("show {}", folder / name)


def test_steps_beyond_the_limit_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_MAX_STEPS", "100")
    lines = [sample(0), {"restart": 1}, *(sample(step) for step in range(60)), *map(free_sample, range(60, 1000)),
             {"step": 59, "loss": 2.0}, {"step": 900, "loss": 3.0},
             {"tail": {"start_ns": 1, "wall_ns": 5, "host_ns": {"checkpoint": 5}}}]  # fmt: skip
    recording = read_recording(write_recording(tmp_path / "run", {}, lines))

    assert (len(recording.samples), recording.num_unread) == (100, 900)
    assert recording.samples[59].loss == 2.0 and recording.tail is not None
    assert summary_of(recording).num_steps == 1000
    (warning,) = recording.warnings
    assert "only the first 100 steps were read, and 900 more were counted; set STEPSCOPE_MAX_STEPS=1000" in warning
    monkeypatch.setenv("STEPSCOPE_MAX_STEPS", "1000")
    assert read_recording(tmp_path / "run").num_unread == 0


def _recording(folder: Path, num_steps: int):
    lines = [sample(step, host_ns={"forward": 10 * MS + 30 * MS * (step % 50 == 7)}) for step in range(40)]
    lines += [sample(step, "free", num_samples=8 + step % 3) for step in range(40, num_steps)]
    return read_recording(write_recording(folder, {}, lines))


@pytest.mark.long
@pytest.mark.parametrize("analysis", [slow_steps, summary_of])
def test_time_grows_with_the_steps_and_not_their_square(analysis, tmp_path):
    def seconds(num_steps: int) -> float:
        recording, times = _recording(tmp_path / str(num_steps), num_steps), []
        for _ in range(3):
            begin = time.process_time()
            analysis(recording)
            times.append(time.process_time() - begin)
        return min(times)

    assert seconds(8_000) < 10 * seconds(2_000) + 0.02  # 4 times if linear, 16 if quadratic


def test_the_interval_of_many_samples_needs_no_resampling():
    few, many = ([100.0 + i * 7919 % 1000 for i in range(num)] for num in (MOST_RESAMPLED, MOST_RESAMPLED + 1))
    one, other = describe(few), describe(many)

    with mock.patch("random.Random.choices", side_effect=AssertionError):
        assert describe(many) == other
    assert abs(one.ci_low - other.ci_low) < 0.02 * one.median and abs(one.ci_high - other.ci_high) < 0.02 * one.median


def test_a_tensor_of_any_number_of_dimensions_has_its_formula_or_none():
    symbols = {"B": 2, "S": 2, "d": 2, "H": 1, "V": 2, "ff": 2}
    tensor = {"shape": [2] * 40, "dtype": "float32", "bytes": 4 << 40, "owner": "activation"}

    with mock.patch("stepscope.analysis.memory.size_formulas._strain", side_effect=AssertionError("tried them all")):
        assert formula(tensor, symbols) is None


# -- sweeps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"run": {"mode": 3, "dtype": "fp32"}}, {"samples_device_ns": [0, 0]}, {"alternatives": {"x": []}},
              {"config": {"seq_len": {}}}, {"facts": {"dropped_share": "x"}}, {"trace": 7}],
)  # fmt: skip
def test_a_damaged_row_is_named(wrong, tmp_path):
    row = {"hash": "a", "workload": "w", "status": "ok", "config": {"seq_len": 64}, "num_tokens": 64,
           "run": {"mode": "step", "dtype": "fp32"}, "samples_device_ns": [1000, 1100]}  # fmt: skip
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | wrong) + "\n")

    for verb in ("compare {} {}", "show {}", "report {} -o {}.html"):
        assert f"line 2 is not a valid row ({next(iter(wrong))}" in answers(verb, tmp_path)


# -- everything ---------------------------------------------------------------------------------------------------


ONCE_BROKEN = (10439, 22761)  # a trace whose name is too long for a file; products in no step


@pytest.mark.parametrize("each", [47, pytest.param(14, marks=pytest.mark.long)])
def test_damaged_inputs_of_every_kind(tmp_path, each):
    """A part of benchmarks/fuzz.py: the same cases in every run."""
    bases = write_bases(tmp_path / "bases")
    numbers = [*range(0, 1400, each), *ONCE_BROKEN]
    assert {PAIRS[number % len(PAIRS)][0] for number in numbers} == {kind for kind, _ in PAIRS}

    broken = [found for number in numbers if (found := run_case(number, bases, tmp_path / "case")).problem]

    assert broken == []


@pytest.mark.long
@pytest.mark.parametrize("verb", ["diagnose {}", "report {} -o {}.html"])
def test_a_million_steps_take_little_memory_and_mostly_reading(verb, tmp_path):
    """Peak memory of a fresh process, and its processor time compared with a tenth of the steps."""
    used = []
    for num_steps in (100_000, 1_000_000):
        folder = cpu_recording(tmp_path / str(num_steps))
        with (folder / "samples.jsonl").open("a") as lines:
            for step in range(12, num_steps):
                lines.write(json.dumps(sample(step, "free")) + "\n")
        words = verb.replace("{}", str(folder)).split()
        code = "import sys; from stepscope.cli.main import main; sys.exit(main(sys.argv[1:]))"
        pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code, *words])
        _, status, usage = os.wait4(pid, 0)
        assert status == 0
        used.append(usage)

    assert used[1].ru_maxrss < 500_000  # KB
    assert used[1].ru_utime < 3 * used[0].ru_utime
