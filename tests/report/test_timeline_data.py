"""The timeline's columns, decoded as the page decodes them, against the tables of the trace."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from typing import Any

import polars as pl
import pytest
from hypothesis import given

from any_trace import any_trace
from parametrized import parametrized
from stepscope.analysis.structure.links import Linked, link
from stepscope.document.model import Timeline
from stepscope.document.sections.timeline import Bytes, timeline_of
from stepscope.document.timeline.tracks import MOST_TRACKS, lanes_of
from stepscope.trace.reader import read_trace
from trace_builder import AUTOGRAD, TRACES, TraceBuilder, needs_traces


class Decoded:
    """A timeline as the page sees it."""

    def __init__(self, timeline: Timeline) -> None:
        self.meta = json.loads(json.dumps(timeline.meta))
        self.data = gzip.decompress(timeline.blob)
        self.strings = json.loads(self.text(self.meta["strings"]))
        self.labels = json.loads(self.text(self.meta["labels"]))
        self.columns = {name: self.column(place) for name, place in self.meta["events"].items()}

    def text(self, place: dict[str, int]) -> str:
        return self.data[place["at"] : place["at"] + place["bytes"]].decode()

    def column(self, place: dict[str, Any]) -> list[int]:
        return decode(self.data, place)

    @property
    def events(self) -> list[dict[str, Any]]:
        texts = {"name", "module", "op", "shapes", "dtypes", "step", "phase", "caller", "more"}
        rows = []
        bounds = self.columns["lanes"]
        for lane in range(self.meta["num_lanes"]):
            for at in range(bounds[lane], bounds[lane + 1]):
                row = {name: column[at] for name, column in self.columns.items() if name != "lanes"}
                row |= {name: self.strings[row[name]] for name in texts}
                row |= {"lane": lane, "kind": self.meta["kinds"][row["kind"]], "at": at, "track": self.track(lane)}
                rows.append(row)
        return rows

    def track(self, lane: int) -> dict[str, Any]:
        (found,) = (t for t in self.meta["tracks"] if t["first_lane"] <= lane < t["first_lane"] + t["num_lanes"])
        return found

    def one(self, name: str, **where: Any) -> dict[str, Any]:
        (found,) = (
            e for e in self.events if e["name"] == name and all(e[key] == value for key, value in where.items())
        )
        return found

    def busy_by_lane(self, level: dict[str, Any]) -> list[int]:
        """What is drawn on each lane at a level: blocks, and the events that are not in one."""
        lengths, bounds = self.columns["length"], self.columns["lanes"]
        blocks, edges = self.column(level["busy"]), self.column(level["lanes"])
        return [
            sum(n for n in lengths[bounds[lane] : bounds[lane + 1]] if n >= level["width"])
            + sum(blocks[edges[lane] : edges[lane + 1]])
            for lane in range(self.meta["num_lanes"])
        ]


def decode(data: bytes, place: dict[str, Any]) -> list[int]:
    """As timeline.js does it."""
    at, num = place["at"], place["num"]
    planes = [data[at + plane * num : at + (plane + 1) * num] for plane in range(place["planes"])]
    numbers = [sum(plane[i] << (8 * shift) for shift, plane in enumerate(planes)) for i in range(num)]
    if place["delta"]:
        last = 0
        for i, coded in enumerate(numbers):
            last = (last + (-(coded + 1 >> 1) if coded & 1 else coded >> 1)) % 2**32
            numbers[i] = last
    return numbers


def decoded(linked: Linked, **limits: int) -> Decoded:
    return Decoded(timeline_of(linked, **limits))


def training(num_steps: int = 2, num_ops: int = 3) -> TraceBuilder:
    """Steps of 1 ms: ops that launch a kernel each, the n-th `n` µs long, a backward thread, memory."""
    trace = TraceBuilder(deviceProperties=[{"name": "Imaginary GPU"}])
    number = 0
    for step in range(num_steps):
        start = 1000 * step
        trace.step(step, start, 990)
        trace.python("train.py(7): forward", start, 500).python("nn.Module: Model_0", start + 1, 400)
        for place in range(num_ops):
            number += 1
            ts = start + 10 + 300 / num_ops * place
            trace.op("aten::mm", ts, 8, id=number, **{"Input Dims": [[2, 3]], "Input type": ["float"]})
            trace.launch("gemm_kernel", ts + 2, (ts + 20, 1 + place), id=number)
        trace.op("autograd::engine::evaluate_function: MmBackward0", start + 600, 50, AUTOGRAD, forward_thread=1)
        trace.memory(start + 20, 1 << 20).memory(start + 700, -(1 << 20))
    return trace


def test_every_event_is_told_with_all_that_is_known_of_it():
    linked = training().linked()

    told = decoded(linked)

    kernel = [event for event in told.events if event["kind"] == "kernel"][1]
    assert kernel["name"] == "gemm_kernel" and kernel["op"] == "aten::mm" and kernel["step"] == "0"
    assert (kernel["shapes"], kernel["dtypes"]) == ("[[2, 3]]", '["float"]')
    assert kernel["module"] == "Model_0" and kernel["caller"] == "train.py(7): forward"
    assert kernel["length"] == 2000 and kernel["track"]["title"] == "GPU 0 · stream 7"
    assert told.meta["tracks"][-1]["kind"] == "host"
    assert [t["kind"] for t in told.meta["tracks"]] == ["steps", "modules", "modules", "gpu", "host", "host"]
    launch = told.events[kernel["launch"] - 1]
    assert launch["name"] == "cudaLaunchKernel"
    assert launch["start"] == kernel["start"] - 18_000
    assert told.meta["note"] == f"{len(told.events)} of {len(told.events)} events drawn individually."


def test_lanes_nest_and_nothing_on_a_lane_overlaps():
    trace = TraceBuilder().op("outer", 0, 100).op("middle", 10, 50).op("inner", 20, 10).op("next", 70, 10)
    told = decoded(trace.linked())

    assert [told.one(name)["lane"] for name in ("outer", "middle", "inner", "next")] == [1, 2, 3, 2]  # 0: phases


def test_kernels_side_by_side_on_one_stream_have_lanes_of_their_own():
    trace = TraceBuilder().kernel("a", 0, 10).kernel("b", 5, 10).kernel("c", 12, 3).kernel("d", 20, 1)

    told = decoded(trace.linked())

    first = told.meta["tracks"][0]["first_lane"]
    assert [told.one(name)["lane"] - first for name in "abcd"] == [0, 1, 0, 0]


def test_communication_has_a_track_and_a_stream_with_nothing_else_is_shown_once():
    trace = TraceBuilder().kernel("ncclDevKernel_AllReduce", 0, 10, stream=9)
    trace.kernel("ncclDevKernel_AllGather", 20, 10, stream=7).kernel("gemm", 40, 10, stream=7)

    told = decoded(trace.linked())

    shown = [(t["title"], t["is_copy"]) for t in told.meta["tracks"]]
    assert shown == [
        ("Communication · stream 7", True), ("Communication · stream 9", False), ("GPU 0 · stream 7", False),
    ]  # fmt: skip


def test_modules_on_the_gpu_last_from_their_first_kernel_to_their_last():
    trace = TraceBuilder()
    for number, module in enumerate(["net.blocks.0.up", "net.blocks.0.down", "net.blocks.1.up"]):
        trace.annotation(f"stepscope.module/{module}", 10 * number, 9).op(
            "aten::mm", 10 * number + 1, 5, id=number + 1
        )
        for kernel in range(2):
            trace.launch("gemm", 10 * number + 2 + kernel, (100 + 20 * number + 5 * kernel, 4), id=number + 1)

    told = decoded(trace.linked())

    runs = [e for e in told.events if e["track"]["title"] == "Modules on GPU · stream 7"]
    shown = [(e["lane"] - e["track"]["first_lane"], e["name"], e["start"] // 1000, e["length"] // 1000) for e in runs]
    assert shown == [
        (0, "net", 100, 49), (1, "blocks.0", 100, 29), (1, "blocks.1", 140, 9),
        (2, "up", 100, 9), (2, "down", 120, 9), (2, "up", 140, 9),
    ]  # fmt: skip
    assert runs[2]["module"] == "net.blocks.1"


@parametrized("most_events", [1_000_000, 300, 40], quick=1)
def test_each_lane_is_as_busy_on_every_level(most_events):
    linked = training(num_steps=20, num_ops=20).linked()

    told = decoded(linked, most_events=most_events)

    by_lane = lanes_of(linked).events.group_by("lane").agg((pl.col("end_ns") - pl.col("start_ns")).sum())
    wanted = [dict(by_lane.iter_rows()).get(lane, 0) for lane in range(told.meta["num_lanes"])]
    assert len(told.meta["levels"]) >= 2
    for level in told.meta["levels"]:
        assert told.busy_by_lane(level) == wanted, level["width"]


def test_blocks_are_counted_disjoint_and_in_order():
    told = decoded(training(num_steps=20, num_ops=20).linked(), most_events=100)
    num_all = told.meta["num_events"]

    for level in told.meta["levels"]:
        starts, lengths = told.column(level["start"]), told.column(level["length"])
        edges, nums = told.column(level["lanes"]), told.column(level["num"])
        apart = sum(n >= level["width"] for n in told.columns["length"])
        assert sum(nums) + apart == num_all
        for lane in range(told.meta["num_lanes"]):
            for at in range(edges[lane] + 1, edges[lane + 1]):
                assert starts[at - 1] + lengths[at - 1] <= starts[at]


def test_the_typical_steps_are_whole_and_elsewhere_the_longest_are_drawn_with_their_launches():
    linked = training(num_steps=30, num_ops=20).linked()
    num_a_step = 1240 // 20

    told = decoded(linked, most_events=3 * num_a_step + 60)

    whole = [event for event in told.events if event["step"] == "29" and event["kind"] == "kernel"]
    assert len(whole) == 20
    elsewhere = [e for e in told.events if e["step"] == "0" and e["kind"] == "kernel"]
    assert all(e["launch"] for e in elsewhere)
    assert told.meta["num_drawn"] == len(told.events) == 3 * num_a_step + 60
    note = told.meta["note"]
    assert note.startswith(f"{told.meta['num_drawn']:,} of {told.meta['num_events']:,} events drawn individually")
    assert "all of steps 27, 28 and 29" in note and "elsewhere those of at least" in note


def test_the_blob_stays_within_its_bytes():
    linked = training(num_steps=60, num_ops=40).linked()
    small = timeline_of(linked, most_bytes=6_000)

    assert len(small.blob) <= 6_000 < len(timeline_of(linked).blob)
    assert small.meta["num_drawn"] < small.meta["num_events"]


HOSTILE = [
    "</script><script>alert(1)</script>",
    "a\u202eb",
    "\x1b[31mred",
    "line\nbreak",
    "\"'`<b>&amp;",
    "x" * 10_000,
]


def test_hostile_names_are_text_of_a_bounded_length_without_control_characters():
    trace = TraceBuilder()
    for place, name in enumerate(HOSTILE):
        trace.op(name, 10 * place, 5).kernel(name, 10 * place, 5, stream=place)
    trace.raw(ph="M", name="thread_name", pid=1, tid=1, args={"name": HOSTILE[0]})

    told = decoded(trace.linked())

    assert "</script><script>alert(1)</script>" in told.strings  # text: the page never makes markup of it
    for text in (*told.strings, *told.labels, *(t["title"] for t in told.meta["tracks"])):
        assert text.isprintable() and len(text) <= 600
    assert any(text.startswith("xxx") and text.endswith("…") for text in told.strings)


def test_an_empty_trace_has_a_timeline_that_says_so():
    told = decoded(TraceBuilder().slice("of nobody", "PyTorch Profiler (0)", 0, 10).linked())

    assert told.meta["tracks"] == [] and told.events == []
    assert told.meta["note"] == "The trace has no events to draw."


def test_a_trace_without_a_gpu_has_threads_and_phases():
    told = decoded(TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20).linked())

    assert [t["kind"] for t in told.meta["tracks"]] == ["steps", "host"]
    assert told.one("aten::mm")["launch"] == 0


def test_of_thousands_of_streams_and_threads_the_busiest_are_shown_and_the_rest_counted():
    trace = TraceBuilder()
    for number in range(3000):
        trace.kernel("k", number, 1 + number / 100, stream=number).op("aten::add", number, 1 + number / 100, number)

    told = decoded(trace.linked())

    kinds = [track["kind"] for track in told.meta["tracks"]]
    assert kinds.count("gpu") == MOST_TRACKS["gpu"] and kinds.count("host") == MOST_TRACKS["host"]
    assert "GPU 0 · stream 2999" in [track["title"] for track in told.meta["tracks"]]
    assert f"{3000 - MOST_TRACKS['gpu']:,} streams of 3,000, the least busy, with 2,952 events" in told.meta["note"]
    assert told.meta["num_events"] >= 6000
    assert len(json.dumps(told.meta)) < 60_000


def test_what_is_nested_too_deep_is_counted():
    trace = TraceBuilder()
    for depth in range(120):
        trace.op("deep", depth, 400 - 2 * depth)

    assert "24 events of" in (note := decoded(trace.linked()).meta["note"]) and "nested deeper than 96" in note


def test_times_before_zero_are_drawn_and_a_time_absurdly_far_is_counted():
    trace = TraceBuilder()
    for number in range(100):
        trace.op("aten::add", number * 10 - 500, 5)
    near = decoded(trace.linked())
    assert near.meta["origin_ns"] == "-500000" and min(near.columns["start"]) == 0

    far = decoded(trace.op("lost", 1e15, 5).linked())
    assert "2 events not drawn" in far.meta["note"]
    assert "lost" not in {event["name"] for event in far.events}
    assert far.meta["tick_ns"] == 1


def test_a_long_trace_has_longer_ticks_and_lanes_stay_disjoint():
    trace = TraceBuilder()
    for number in range(50):
        trace.op("aten::add", number * 1e6, 1e6)

    told = decoded(trace.linked())

    assert told.meta["tick_ns"] == pytest.approx(50e9 / (2**32 - 1))
    adds = [event for event in told.events if event["name"] == "aten::add"]
    assert all(one["start"] + one["length"] <= two["start"] for one, two in pairwise(adds))
    assert adds[-1]["start"] + adds[-1]["length"] == pytest.approx(2**32 - 1, abs=1)
    assert "Times are rounded to 12 ns." in told.meta["note"]


def test_memory_is_drawn_with_its_true_highest():
    trace = TraceBuilder().op("aten::empty", 0, 100_000)
    total = 0
    for number in range(40_000):
        change = 1000 if number % 2 == 0 else -1000
        total += change + (5_000_000 if number == 12_345 else 0)
        args = {"Device Type": 1, "Device Id": 0, "Addr": number, "Bytes": change, "Total Allocated": total}
        trace.raw(ph="i", name="[memory]", pid=1, tid=1, ts=number, s="t", args=args)

    told = decoded(trace.linked())

    (curve,) = told.meta["memory"]
    values = told.column(curve["allocated"])
    assert max(values) == 5_001_000 and len(values) <= 16_000 and curve["unit_bytes"] == 1
    assert "of 40,000 changes" in told.meta["note"]


def test_columns_of_any_numbers_come_back():
    for numbers in ([], [0], [7, 3, 2**32 - 1, 0, 255, 256, 65_536], list(range(1000))):
        for delta in (False, True):
            data = Bytes()
            data.add_text("before")
            place = data.add(pl.Series(numbers, dtype=pl.Int64), delta)
            assert decode(data.joined(), place) == numbers


@given(any_trace())
def test_of_any_trace_every_event_is_there_once(builder):
    linked = builder.linked()
    told = decoded(linked)

    shown = [e for e in told.events if not e["track"]["is_copy"]]
    on_host = [e for e in shown if e["track"]["kind"] == "host"]
    assert len(on_host) == linked.host.filter(pl.col("kind") != "other").height
    kernels = [e for e in shown if e["kind"] in ("kernel", "memcpy", "memset")]
    assert sorted(e["start"] + int(told.meta["origin_ns"]) for e in kernels) == linked.device["start_ns"].to_list()
    assert sum(e["launch"] > 0 for e in kernels) == linked.device["launch"].drop_nulls().len()
    assert sum(e["length"] for e in kernels) == linked.device["duration_ns"].sum()


@needs_traces
@parametrized("path", ["public/qwen0.5b_h100_stacks.json.gz", "h200/llama_compiled.json.gz"], quick=1)
def test_real_traces_link_as_their_tables_do(path):
    linked = link(read_trace(TRACES / path, workers=1))
    told = decoded(linked)

    kernels = [e for e in told.events if e["track"]["kind"] == "gpu"]
    origin, host = int(told.meta["origin_ns"]), linked.host
    starts = {event["at"]: event["start"] for event in told.events}
    links = sorted((e["start"], starts[e["launch"] - 1]) for e in kernels if e["launch"])
    launched = linked.device.drop_nulls("launch")
    wanted = zip(launched["start_ns"] - origin, host["start_ns"].gather(launched["launch"]) - origin)
    assert links == sorted(wanted)
    for level in told.meta["levels"]:
        assert sum(told.busy_by_lane(level)) == sum(told.columns["length"])
