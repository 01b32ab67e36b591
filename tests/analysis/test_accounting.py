"""What docs/accounting.md calls odd but real: a test by the name of each, and the DataLoader's share it explains.

Traces written by hand show each alone; where a real trace has it, that is asked as well.
"""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.kernels.kernels import launches, top_kernels
from stepscope.analysis.ranks.rank_account import RankAccount, account, phase_table, step_table
from stepscope.analysis.structure.links import Linked, link
from stepscope.analysis.time.idle_causes import idle_causes, idle_gaps
from stepscope.trace.reader import read_trace
from trace_builder import AUTOGRAD, PUBLIC, TraceBuilder, needs_traces

PAGE = Path(__file__).parents[2] / "docs" / "accounting.md"
NODE = "autograd::engine::evaluate_function: MmBackward0"
MS = 1_000_000


@cache
def real(name: str) -> Linked:
    return link(read_trace(PUBLIC / f"{name}.json.gz"))


@cache
def real_account(name: str) -> RankAccount:
    return account(read_trace(PUBLIC / f"{name}.json.gz"), 0)


def causes_of(linked: Linked) -> dict[str, int]:
    table = idle_causes(idle_gaps(linked))
    return {cause: ns for cause, ns in zip(table["cause"], table["total_ns"]) if ns}


def union_ns(spans: list[tuple[int, int]]) -> int:
    total, reach = 0, None
    for start, end in sorted(spans):
        total += max(0, end - (start if reach is None else max(start, reach)))
        reach = end if reach is None else max(reach, end)
    return total


def test_every_odd_thing_on_the_page_has_a_test_of_its_name():
    odd = PAGE.read_text().split("## Odd but real")[1].split("\n## ")[0]
    names = [re.sub(r"\W+", "_", title.lower()).strip("_") for title in re.findall(r"^- \*\*(.+?)\*\*", odd, re.M)]

    tests = [name for name in globals() if name.startswith("test_")]

    assert len(names) >= 9
    assert [name for name in names if not any(test.startswith(f"test_{name}") for test in tests)] == []


# -- Kernels that start before their launch ---------------------------------------------------------------------


def test_kernels_that_start_before_their_launch():
    # GIVEN two kernels that start 5 and 2 µs before the calls that launched them
    trace = (
        TraceBuilder().launch("first", 90, (100, 10)).launch("second", 210, (205, 10)).launch("third", 302, (300, 5))
    )
    linked = trace.linked()

    # THEN they keep their times, have no latency, are counted, and the gaps before them are launch
    assert linked.device["start_ns"].to_list() == [100_000, 205_000, 300_000]
    found = launches(linked)
    assert (found["num_before_launch"], found["latency_p50_ns"], found["latency_p99_ns"]) == (2, 0, 10_000)
    assert causes_of(linked) == {"launch": 95_000 + 85_000}


# -- Kernels whose launch is not in the trace -------------------------------------------------------------------


def test_kernels_whose_launch_is_not_in_the_trace():
    # GIVEN a kernel that runs in a step and was launched before the trace began
    account = TraceBuilder().step(1, 0, 100).launch("a", 10, (60, 5)).kernel("early", 20, 5).account()

    # THEN it is in GPU time and kernels, and in no step and no phase
    assert account.gpu_time.busy_ns == 10_000 and set(account.top_kernels["name"]) == {"a", "early"}
    assert account.launches["num_unlaunched_kernels"] == 1
    assert account.steps["num_kernels"].to_list() == [1]
    assert account.phases.row(-1, named=True)["num_kernels"] == 1


@needs_traces
def test_kernels_whose_launch_is_not_in_the_trace_of_a_resnet():
    account = real_account("resnet_act_checkpoint_mi300")

    assert account.steps["num_kernels"].to_list() == [746, 746, 746]
    assert account.launches["num_kernel_launches_per_step"] == 746
    assert account.launches["num_unlaunched_kernels"] == 757


@needs_traces
@pytest.mark.parametrize("name", ["qwen0.5b_mi300_stacks", "qwen0.5b_h100_stacks", "gpu_user_annotation_gp100"])
def test_kernels_a_step_are_the_same_by_phase_and_by_launch(name):
    account = real_account(name)
    *phases, outside = account.phases.to_dicts()

    by_phase = sum(row["num_kernels"] for row in phases) / account.steps.height
    assert by_phase == account.launches["num_kernel_launches_per_step"] == account.steps["num_kernels"].mean()
    assert outside["num_kernels"] > 0
    assert sum(row["device_ns"] for row in (*phases, outside)) == account.gpu_time.busy_ns


# -- AMD durations that overflow the next slice -----------------------------------------------------------------


def test_amd_durations_that_overflow_the_next_slice():
    # GIVEN a kernel of 30 µs at 0, and on the same stream the next at 20
    result = TraceBuilder().kernel("long", 0, 30).kernel("next", 20, 15).account()

    # THEN the union counts what they share once, and sums by name as they were recorded
    assert (result.gpu_time.busy_ns, result.gpu_time.window_ns) == (35_000, 35_000)
    assert dict(zip(result.top_kernels["name"], result.top_kernels["total_ns"])) == {"long": 30_000, "next": 15_000}


@needs_traces
@pytest.mark.parametrize("name", ["resnet_act_checkpoint_mi300", "trace_diff/test"])
def test_amd_durations_that_overflow_the_next_slice_in_real_traces(name):
    linked = real(name)
    recorded = int(linked.device["duration_ns"].sum())
    busy = union_ns(linked.device.select("start_ns", "end_ns").rows())

    assert int(top_kernels(linked.device)["total_ns"].sum()) == recorded > busy
    assert real_account(name).gpu_time.busy_ns == busy


# -- Partly overlapping slices on one thread --------------------------------------------------------------------


def test_partly_overlapping_slices_on_one_thread():
    # GIVEN an op from 0 to 10 µs and a call that starts in it at 5 and ends after it, at 15
    linked = TraceBuilder().op("aten::mm", 0, 10).call("cudaLaunchKernel", 5, 10).linked()
    by_name = {row["name"]: row for row in linked.host.with_columns(pl.col("name").cast(pl.String)).to_dicts()}

    assert by_name["cudaLaunchKernel"]["parent"] == by_name["aten::mm"]["row"]
    assert (by_name["aten::mm"]["self_ns"], by_name["cudaLaunchKernel"]["self_ns"]) == (5_000, 10_000)


@needs_traces
@pytest.mark.parametrize(
    ("name", "num_partial"),
    [("qwen0.5b_h100_stacks", 2), ("qwen0.5b_mi300_stacks", 2), ("resnet_act_checkpoint_mi300", 24)],
)
def test_partly_overlapping_slices_on_one_thread_in_real_traces(name, num_partial):
    host = real(name).host
    outlasting = host.filter(host["end_ns"] > host["end_ns"].gather(host["parent"]))

    assert outlasting.height == num_partial
    for _, thread in host.group_by("thread"):
        assert int(thread["self_ns"].sum()) == union_ns(thread.select("start_ns", "end_ns").rows())


# -- Graph capture that looks like idle time --------------------------------------------------------------------


def test_graph_capture_that_looks_like_idle_time():
    # GIVEN launches that are written down and not run, between the GPU's first work and the graph's
    trace = TraceBuilder().step(0, 0, 1000).launch("warm up", 90, (100, 10))
    trace.call("cudaStreamBeginCapture", 120, 2)
    for moment in range(130, 190, 10):
        trace.op("aten::mm", moment, 8).call("cudaLaunchKernel", moment + 2, 3)
    trace.call("cudaStreamEndCapture", 200, 0).launch("graph", 220, [(225, 5), (230, 5)], call="cudaGraphLaunch")
    linked = trace.linked()

    # THEN the capture is compile, and none of its launches is one
    assert causes_of(linked) == {"compile": 80_000, "launch": 5_000, "python": 30_000}
    assert launches(linked)["num_kernels"] == 3


# -- Steps without GPU events -----------------------------------------------------------------------------------


def test_steps_without_gpu_events():
    trace = TraceBuilder().step(1, 0, 100).step(2, 150, 100).op("aten::mm", 10, 5).launch("a", 12, (20, 5))
    rows = step_table(trace.linked()).select("step", "num_kernels", "gpu_busy_ns").rows()

    assert rows == [(1, 1, 5_000), (2, 0, 0)]


def test_steps_without_gpu_events_in_a_trace_without_any():
    result = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 50).account()

    assert result.gpu_time.window_ns == 0 and result.steps["gpu_busy_ns"].to_list() == [0]
    assert dict(zip(result.phases["phase"], result.phases["host_ns"]))["forward"] == 50_000
    assert result.idle_causes["total_ns"].sum() == 0 and result.longest_gaps.is_empty()


@needs_traces
@pytest.mark.parametrize(("name", "num_steps"), [("cpu_only_gloo", 5), ("rank_non_gpu", 1)])
def test_steps_without_gpu_events_in_real_traces(name, num_steps):
    result = real_account(name)

    assert result.steps["num_kernels"].to_list() == result.steps["gpu_busy_ns"].to_list() == [0] * num_steps
    assert int(result.phases["host_ns"].sum()) == int(result.steps["duration_ns"].sum()) > 0


@needs_traces
def test_steps_without_gpu_events_beside_a_step_with_some():
    kernels = real_account("mi250_minitoy_train_ROCm6_2_kineto").steps["num_kernels"].to_list()

    assert len(kernels) == 2 and sorted(kernels)[0] == 0 < sorted(kernels)[1]


# -- Annotations that vanish with stacks on ---------------------------------------------------------------------


def with_stacks() -> TraceBuilder:
    """Two steps with frames of Python and without a label."""
    trace = TraceBuilder()
    for begin in (0, 100):
        trace.python("train.py(5): step", begin, 95).op("aten::mm", begin + 10, 20)
        trace.op(NODE, begin + 40, 20, AUTOGRAD)
    return trace


def test_annotations_that_vanish_with_stacks_on():
    result = with_stacks().account()

    # THEN autograd says where steps end, and the result says that it did
    assert result.step_source == "backward"
    assert result.steps.select("step", "start_ns", "duration_ns").rows() == [(0, 0, 60_000), (1, 60_000, 100_000)]


def test_annotations_that_vanish_with_stacks_on_but_for_the_optimizers():
    trace = with_stacks().annotation("Optimizer.step#SGD.step", 70, 10).annotation("Optimizer.step#SGD.step", 170, 10)
    result = trace.account()

    assert result.step_source == "optimizer"
    assert result.steps["duration_ns"].to_list() == [80_000, 100_000]


@needs_traces
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gpu_user_annotation_gp100", "optimizer"),
        ("event_sync_multi_stream_a100", "none"),
        ("qwen0.5b_mi300_stacks", "ProfilerStep"),
    ],
)
def test_annotations_that_vanish_with_stacks_on_and_the_source_of_steps_in_real_traces(name, source):
    result = real_account(name)

    assert result.step_source == source
    assert result.steps.height == {"optimizer": 5, "none": 0, "ProfilerStep": 1}[source]


# -- Durations that cannot be -----------------------------------------------------------------------------------


def test_durations_that_cannot_be(tmp_path):
    days = 86_400 * 1_000_000
    trace = TraceBuilder().kernel("sound", 10, 5).kernel("negative", 20, -1).kernel("negative", 30, -7)
    trace.kernel("104 days", 40, 104 * days).kernel("105 days", 50, 105 * days)
    trace.raw(ph="X", cat="kernel", name="no time", pid=0, tid=7, dur=5, args={"stream": 7})
    text = trace.write(tmp_path / "trace.json").read_text()
    result = trace.account()

    # THEN what cannot be is in no table, and a warning has how many and the byte of the first
    assert set(result.top_kernels["name"]) == {"sound", "104 days"}
    negative, long, timeless = result.warnings
    assert re.search(r"\b2 events.*negative", negative)
    assert re.search(r"\b1 events?.*104 days", long)
    assert re.search(r"\b1 events?.*time", timeless)
    for warning, name in ((negative, "negative"), (long, "105 days"), (timeless, "no time")):
        offset = int(re.search(r"byte ([\d,]+)", warning)[1].replace(",", ""))
        event = json.JSONDecoder().raw_decode(text[offset:])[0]
        assert event["name"] == name


# -- A complete event without a duration ------------------------------------------------------------------------


def test_a_complete_event_without_a_duration():
    trace = TraceBuilder().kernel("sound", 10, 5)
    trace.raw(ph="X", cat="kernel", name="point", pid=0, tid=7, ts=30, args={"device": 0, "stream": 7})
    result = trace.account()

    assert dict(zip(result.top_kernels["name"], result.top_kernels["total_ns"])) == {"sound": 5_000, "point": 0}
    assert (result.gpu_time.window_ns, result.gpu_time.busy_ns) == (20_000, 5_000)
    assert result.warnings == ()


# -- Events that no table keeps ---------------------------------------------------------------------------------


def test_events_that_no_table_keeps():
    trace = TraceBuilder().op("aten::mm", 0, 5).kernel("a", 10, 5)
    for letter in ("s", "f"):
        trace.raw(ph=letter, cat="ac2g", name="ac2g", id=1, pid=1, tid=1, ts=1)
    trace.raw(ph="C", cat="counter", name="power", pid=0, ts=2, args={"watts": 300})
    trace.raw(ph="i", cat="cpu_instant_event", name="Iteration Start", pid=1, tid=1, ts=3, s="g")
    counts = trace.account().counts

    kept_nowhere = counts.filter(pl.col("table").is_null())
    assert set(kept_nowhere.select("phase", "category", "num_events").rows()) == {
        ("s", "ac2g", 1),
        ("f", "ac2g", 1),
        ("C", "counter", 1),
        ("i", "cpu_instant_event", 1),
    }
    assert int(counts["num_events"].sum()) == 6


@needs_traces
@pytest.mark.parametrize("name", ["event_sync_multi_stream_a100", "triton_mi300", "gpu_user_annotation_gp100"])
def test_events_that_no_table_keeps_in_real_traces(name):
    """Every event of the file is counted: none is dropped in silence."""
    events = json.loads(gzip.decompress((PUBLIC / f"{name}.json.gz").read_bytes()))["traceEvents"]
    counts = real_account(name).counts

    assert int(counts["num_events"].sum()) == len(events) == real_account(name).num_events
    for letter in {event["ph"] for event in events}:
        found = int(counts.filter(pl.col("phase") == letter)["num_events"].sum())
        assert found == sum(event["ph"] == letter for event in events)


# -- The DataLoader of resnet50_v100_torch1.9 -------------------------------------------------------------------


@needs_traces
def test_the_dataloader_of_resnet50_v100_torch1_9():
    # GIVEN steps, fetches and GPU work as the file has them: whole microseconds
    events = json.loads(gzip.decompress((PUBLIC / "resnet50_v100_torch1.9.json.gz").read_bytes()))["traceEvents"]
    spans = {"step": [], "fetch": [], "gpu": []}
    for event in events:
        if event.get("ph") != "X":
            continue
        kind = "gpu" if event["cat"] in ("Kernel", "Memcpy", "Memset") else None
        kind = "step" if event["name"].startswith("ProfilerStep#") else kind
        kind = "fetch" if event["name"].startswith("enumerate(DataLoader)#") else kind
        if kind:
            start = 1000 * int(event["ts"])
            spans[kind].append((start, start + 1000 * int(event["dur"])))
    fetching, steps = union_ns(spans["fetch"]), union_ns(spans["step"])
    without_gpu = union_ns(spans["fetch"] + spans["gpu"]) - union_ns(spans["gpu"])
    whole = max(end for _, end in spans["gpu"]) - min(start for start, _ in spans["step"])

    # THEN the page has its three figures right
    page = PAGE.read_text()
    assert (fetching, steps, without_gpu, whole) == (272_769_000, 917_731_000, 213_022_000, 929_468_000)
    assert (
        f"{fetching / MS:.3f} ms of {steps / MS:.3f} ms of steps: {fetching / steps:.1%}".replace("%", " %") in page
    )
    assert f"{without_gpu / MS:.3f} ms: {without_gpu / steps:.1%} of the steps".replace("%", " %") in page
    assert f"({whole / MS:.3f} ms)" in page and f"{without_gpu / whole:.1%}" == "22.9%"

    # AND we show the first as the phase `data`, and the second, within the GPU's own window, as the idle cause
    linked = real("resnet50_v100_torch1.9")
    table = phase_table(linked)
    assert dict(zip(table["phase"], table["host_ns"]))["data"] == fetching
    assert int(table["host_ns"].sum()) == steps
    first_gpu = min(start for start, _ in spans["gpu"])
    inside = [(max(start, first_gpu), max(end, first_gpu)) for start, end in spans["fetch"]]
    in_window = union_ns(inside + spans["gpu"]) - union_ns(spans["gpu"])
    assert in_window == 166_932_000 and without_gpu - in_window == 46_090_000
    assert causes_of(linked)["data"] <= in_window


@needs_traces
def test_the_forward_of_resnet50_v100_torch1_9_is_its_convolutions():
    device = real("resnet50_v100_torch1.9").device
    convolutions = device.filter(pl.col("op_name").cast(pl.String) == "aten::cudnn_convolution")

    assert convolutions.height == 606
    assert set(convolutions["phase"]) == {"forward"}


@needs_traces
def test_a_trace_whose_steps_are_labeled_on_another_thread_has_its_phases():
    assert real("triton_example").device["phase"].to_list() == ["forward"]
