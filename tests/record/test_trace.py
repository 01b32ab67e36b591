"""The trace window: a summary from hand-made events, a file that is cut when too large, and a real one."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stepscope
from stepscope.recorder import trace_window as trace_module
from stepscope.recorder.trace_window import _named, summarize, trim, union_ns
from stepscope.recorder.windows import Windows

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


@dataclass
class Event:
    """What summarize() asks of one of Kineto's events."""

    label: str
    start: int
    length: int = 0
    device: torch.autograd.DeviceType = CPU
    correlation: int = 0
    user: bool = False

    def name(self):
        return self.label

    def start_ns(self):
        return self.start

    def duration_ns(self):
        return self.length

    def device_type(self):
        return self.device

    def correlation_id(self):
        return self.correlation

    def is_user_annotation(self):
        return self.user


def phase(name: str, start: int) -> Event:
    return Event(f"stepscope.phase/{name}", start, user=True)


def launch(correlation: int, start: int, name: str = "cudaLaunchKernel") -> Event:
    return Event(name, start, 1, correlation=correlation)


def kernel(correlation: int, start: int, length: int, name: str = "gemm") -> Event:
    return Event(name, start, length, CUDA, correlation)


def one_step(*events: Event) -> dict:
    ranges = [
        Event("ProfilerStep#0", 0, 100, user=True),
        phase("between", 0),
        phase("forward", 10),
        phase("backward", 40),
        phase("between", 70),
        phase("optimizer", 80),
        phase("between", 90),
    ]
    return summarize([*ranges, *events], num_steps=1)


def test_gpu_time_belongs_to_the_phase_that_launched_it():
    facts = one_step(
        launch(1, 5), kernel(1, 20, 3),
        launch(2, 15), kernel(2, 30, 20),
        launch(3, 45), kernel(3, 60, 30),  # runs on while the host is in the optimizer
        launch(4, 85), kernel(4, 95, 4),
        launch(5, 75), kernel(5, 91, 1),
    )  # fmt: skip

    assert facts["gpu_busy_ns_by_phase"] == {
        "before_forward": 3,
        "forward": 20,
        "backward": 30,
        "optimizer": 4,
        "other": 1,
    }
    assert (facts["gpu_busy_ns"], facts["num_kernels"], facts["window_ns"]) == (58, 5, 100)


def test_kernels_that_overlap_are_counted_once():
    facts = one_step(
        launch(1, 15), kernel(1, 20, 10), launch(2, 16), kernel(2, 25, 10), launch(3, 50), kernel(3, 30, 10)
    )

    assert facts["gpu_busy_ns_by_phase"] == {"forward": 15, "backward": 10}
    assert facts["gpu_busy_ns"] == 20


def test_a_kernel_nobody_launched_is_unattributed():
    facts = one_step(kernel(99, 20, 10))

    assert facts["gpu_busy_ns_by_phase"] == {"unattributed": 10}


def test_copies_are_busy_time_and_no_kernels():
    facts = one_step(
        launch(1, 15, "cudaMemcpyAsync"), kernel(1, 20, 5, "Memcpy HtoD"), kernel(1, 26, 5, "Memset (Device)")
    )

    assert (facts["gpu_busy_ns"], facts["num_kernels"]) == (10, 0)


def test_what_the_gpu_shows_of_our_ranges_and_the_users_is_not_work():
    facts = one_step(
        Event("my block", 12, 20, user=True),
        Event("my block", 12, 20, CUDA),
        Event("stepscope.phase/forward", 12, 20, CUDA),
        Event("stepscope.module/layer", 12, 20, CUDA),
        Event("ProfilerStep#0", 12, 20, CUDA),
    )

    assert (facts["gpu_busy_ns"], facts["num_kernels"]) == (0, 0)


def test_graph_launches_templates_and_ops_are_counted():
    facts = one_step(
        launch(1, 15, "cudaGraphLaunch"),
        kernel(1, 20, 1),
        kernel(1, 21, 1, "triton_tem_fused_mm_1"),
        Event("aten::mm", 15, 1),
        Event("aten::relu", 16, 1),
    )

    assert (facts["num_graph_launches"], facts["num_template_kernels"], facts["num_ops"]) == (1, 1, 2)


def test_an_empty_window_is_zeros():
    facts = summarize([], 0)
    assert facts["gpu_busy_ns"] == facts["num_kernels"] == facts["window_ns"] == 0
    assert facts["gpu_busy_ns_by_phase"] == {}


def test_a_step_that_was_cut_off_is_not_in_the_summary():
    """GIVEN a script that ended inside the second traced step THEN only the first whole step is summed up."""
    first = [Event("ProfilerStep#0", 0, 100, user=True), phase("forward", 0), launch(1, 10), kernel(1, 20, 5)]
    cut = [Event("ProfilerStep#1", 100, 50, user=True), phase("forward", 100), launch(2, 110), kernel(2, 120, 5)]
    facts = summarize(first + cut, num_steps=1)

    assert (facts["window_ns"], facts["gpu_busy_ns"], facts["num_kernels"]) == (100, 5, 1)


INTERVAL = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda at: (at[0], at[0] + at[1]))
INTERVALS = st.lists(INTERVAL, max_size=30)


@given(INTERVALS)
def test_the_union_is_the_number_of_covered_nanoseconds(intervals):
    covered = {ns for start, end in intervals for ns in range(start, end)}

    assert union_ns(intervals) == len(covered)


@given(INTERVALS, st.randoms(use_true_random=False))
def test_the_union_does_not_depend_on_the_order(intervals, random):
    shuffled = intervals.copy()
    random.shuffle(shuffled)

    assert union_ns(shuffled) == union_ns(intervals)


def write_trace(path, events: list[dict]) -> None:
    with gzip.open(path, "wt") as stream:
        json.dump({"schemaVersion": 1, "traceEvents": events}, stream)


def read_trace(path) -> dict:
    with gzip.open(path, "rt") as stream:
        return json.load(stream)


def x(name: str, ts: float, dur: float = 1, **fields) -> dict:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, **fields}


def two_steps() -> list[dict]:
    return [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        x("ProfilerStep#4", 100, 50),
        x("ProfilerStep#5", 150, 50),
        *(x(f"op {i}", 100 + i) for i in range(100)),
        {"ph": "s", "name": "flow", "ts": 110, "id": 1},
        {"ph": "f", "name": "flow", "ts": 111, "id": 1},
    ]


def test_a_small_trace_is_not_touched(tmp_path):
    path = tmp_path / "t.json.gz"
    write_trace(path, two_steps())
    before = path.read_bytes()

    assert trim(path) is None
    assert path.read_bytes() == before


def test_a_large_trace_is_cut_to_its_first_step_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "t.json.gz"
    write_trace(path, two_steps())
    monkeypatch.setattr(trace_module, "MAX_TRACE_BYTES", path.stat().st_size - 1)

    said = trim(path)

    kept = read_trace(path)
    assert kept["schemaVersion"] == 1
    names = [event["name"] for event in kept["traceEvents"]]
    assert names[:2] == ["process_name", "ProfilerStep#4"] and "op 0" in names and "op 99" not in names
    assert "flow" not in names
    assert "first step" in said and "MiB" in said


def test_cutting_keeps_the_first_steps_kernels_that_ran_late(tmp_path, monkeypatch):
    """GIVEN a GPU behind its host THEN a kernel belongs to the step that launched it, whenever it ran."""
    path = tmp_path / "t.json.gz"
    events = two_steps()
    events += [
        x("cudaLaunchKernel", 120, cat="cuda_runtime", args={"correlation": 7}),
        x("late gemm", 170, cat="kernel", args={"correlation": 7}),
        x("cudaLaunchKernel", 160, cat="cuda_runtime", args={"correlation": 8}),
        x("next gemm", 180, cat="kernel", args={"correlation": 8}),
    ]
    write_trace(path, events)
    monkeypatch.setattr(trace_module, "MAX_TRACE_BYTES", path.stat().st_size - 1)
    trim(path)

    names = [event["name"] for event in read_trace(path)["traceEvents"]]
    assert "late gemm" in names and "next gemm" not in names


def test_one_step_that_is_too_large_by_itself_is_cut_below_the_limit_too(tmp_path, monkeypatch):
    path = tmp_path / "t.json.gz"
    write_trace(path, [x("ProfilerStep#0", 0, 5000), *(x(f"op {i * 7919}", i, 0.5) for i in range(5000))])
    limit = path.stat().st_size // 3
    monkeypatch.setattr(trace_module, "MAX_TRACE_BYTES", limit)
    trim(path)

    assert path.stat().st_size <= limit
    assert any(event["name"] == "ProfilerStep#0" for event in read_trace(path)["traceEvents"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The trace and the recording of two real steps."""
    folder = tmp_path_factory.mktemp("trace") / "run"
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.record(folder, model=model, windows=Windows(warmup=2, clean=1, trace=2, memory=0)):
        for _ in range(7):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return read_trace(folder / "trace" / "rank0.json.gz"), json.loads((folder / "recording.json").read_text())


def test_a_real_window_has_its_steps_phases_and_modules_by_name(real):
    trace, _ = real
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]

    # Two steps of warm-up, a clean one, and one that warms the profiler up come first.
    assert [name for name in names if name.startswith("ProfilerStep#")] == ["ProfilerStep#4", "ProfilerStep#5"]
    phases = [name for name in names if name.startswith("stepscope.phase/")]
    for name in ("forward", "backward", "optimizer"):
        assert phases.count(f"stepscope.phase/{name}") == 2
    modules = [name.removeprefix("stepscope.module/") for name in names if name.startswith("stepscope.module/")]
    assert sorted(modules) == sorted(["Model", "blocks.0", "blocks.1", "blocks.1.0", "blocks.1.1"] * 2)


def overlapping(events: list[dict]) -> list[str]:
    """The names of events that begin inside another of their thread and end outside of it."""
    found = []
    for thread in {event["tid"] for event in events}:
        open_events: list[dict] = []
        for event in sorted((e for e in events if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"] + 0.0005:
                open_events.pop()
            # In microseconds, and rounded.
            end = event["ts"] + event["dur"] - 0.0015
            if open_events and end > open_events[-1]["ts"] + open_events[-1]["dur"]:
                found.append(f"{event['name']} in {open_events[-1]['name']}")
            open_events.append(event)
    return found


def test_overlapping_ranges_are_found():
    assert overlapping([x("a", 0, 10, tid=1), x("b", 2, 3, tid=1), x("c", 5, 5, tid=1)]) == []
    assert overlapping([x("a", 0, 10, tid=1), x("b", 5, 10, tid=2)]) == []
    assert overlapping([x("a", 0, 10, tid=1), x("b", 5, 10, tid=1)]) == ["b in a"]


@pytest.mark.parametrize("categories", [("user_annotation",), ("user_annotation", "cpu_op")])
@pytest.mark.parametrize("whose", ["ours", "everybody's"])
def test_a_real_windows_ranges_nest_on_every_thread(real, categories, whose):
    """Perfetto leaves out or misplaces slices of one thread that overlap without one holding the other."""
    trace, _ = real
    ranges = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in categories]
    if whose == "ours":
        ranges = [e for e in ranges if e["name"].startswith(("stepscope.", "ProfilerStep#", "aten::"))]

    assert len(ranges) > 10
    assert overlapping(ranges) == []


def test_a_real_windows_facts_say_what_was_written(real, tmp_path):
    _, recording = real
    facts = recording["trace"]

    assert (facts["num_steps"], facts["file"], facts["trimmed"]) == (2, "trace/rank0.json.gz", None)
    assert facts["num_ops"] > 0 and facts["num_kernels"] == 0 and facts["window_ns"] > 0 and facts["bytes"] > 0
    assert recording.get("notes") is None


def test_several_roots_are_told_apart_by_their_class():
    assert [name for name, _ in _named([Model()])][:3] == ["Model", "blocks", "blocks.0"]
    assert [name for name, _ in _named([nn.Linear(1, 1), nn.Sequential(nn.ReLU())])] == [
        "Linear",
        "Sequential",
        "Sequential.0",
    ]


def test_every_repetition_of_the_trace_window_comes_and_has_its_file(tmp_path):
    """Playbooks run `wait + warm-up + active · repeat` steps, so that the second cycle never comes."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = Windows(warmup=2, clean=1, trace=2, repeat=3, memory=1)
    with stepscope.record(tmp_path / "run", model=model, windows=windows):
        for _ in range(windows.num_steps):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    facts = json.loads((tmp_path / "run/recording.json").read_bytes())
    traces = [facts["trace"], *facts["trace"]["repeated"]]
    assert facts["windows"] == {"warmup": 2, "clean": 1, "trace_warmup": 3, "trace": 6, "memory": 1}
    assert [each["num_steps"] for each in traces] == [2, 2, 2]
    names = ["trace/rank0.json.gz", "trace/repeat2/rank0.json.gz", "trace/repeat3/rank0.json.gz"]
    assert [each["file"] for each in traces] == names
    labels = []
    for name in names:
        events = read_trace(tmp_path / "run" / name)["traceEvents"]
        labels += [e["name"] for e in events if str(e.get("name")).startswith("ProfilerStep#") and e.get("ph") == "X"]
    samples = [sample for sample in stepscope.open(tmp_path / "run").recording.samples if sample.window == "trace"]
    assert labels == [f"ProfilerStep#{sample.step}" for sample in samples] and len(labels) == 6
    # The first is what readers look at.
    assert stepscope.analyze(tmp_path / "run").ranks[0].steps["step"].to_list() == [4, 5]
