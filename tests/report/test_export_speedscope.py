"""`stepscope export … speedscope`: the rules of its file format, and the times of the trace."""

from __future__ import annotations

import json

import pytest

from stepscope.analysis.structure.links import Linked, link
from stepscope.exporters.selection import select
from stepscope.exporters.speedscope import SCHEMA, Speedscope
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, TraceBuilder, needs_traces

NASTY = '</script><b>"\n\u202e'


def made(linked: Linked, **asked: object) -> tuple[dict, int]:
    speedscope = Speedscope(select(linked, **asked), "trace")
    return json.loads("".join(speedscope.texts())), speedscope.num_cut


def hold_the_rules(document: dict) -> None:
    """What the published schema and speedscope's importer ask for."""
    assert document["$schema"] == SCHEMA
    frames = document["shared"]["frames"]
    assert all(isinstance(frame["name"], str) for frame in frames)
    assert len({frame["name"] for frame in frames}) == len(frames)
    for profile in document["profiles"]:
        assert profile["type"] == "evented" and profile["unit"] == "nanoseconds" and isinstance(profile["name"], str)
        opened: list[int] = []
        last = profile["startValue"]
        for event in profile["events"]:
            assert last <= event["at"] <= profile["endValue"]
            assert 0 <= event["frame"] < len(frames)
            last = event["at"]
            if event["type"] == "O":
                opened.append(event["frame"])
            else:
                assert event["type"] == "C" and opened.pop() == event["frame"]
        assert not opened


def told(document: dict, name: str) -> list[tuple[str, str, int]]:
    """The events of a profile, with the names of their frames."""
    profile = next(profile for profile in document["profiles"] if profile["name"] == name)
    names = [frame["name"] for frame in document["shared"]["frames"]]
    return [(event["type"], names[event["frame"]], event["at"]) for event in profile["events"]]


def test_a_thread_opens_and_closes_what_is_inside_one_another():
    trace = TraceBuilder().op("outer", 1, 10).op(NASTY, 2, 3).op("next", 5, 1).op("alone", 20, 2)
    document, num_cut = made(trace.linked())

    hold_the_rules(document)
    assert num_cut == 0
    assert told(document, "thread 0") == [
        ("O", "outer", 0), ("O", NASTY, 1000), ("C", NASTY, 4000), ("O", "next", 4000), ("C", "next", 5000),
        ("C", "outer", 10000), ("O", "alone", 19000), ("C", "alone", 21000),
    ]  # fmt: skip


def test_a_stream_shows_the_modules_and_the_op_around_each_kernel():
    trace = TraceBuilder().annotation("stepscope.module/a", 0, 50).op("aten::mm", 5, 20, id=1)
    trace.launch("gemm", 6, (100, 10), id=1).launch("gemm", 8, (110, 5), id=1).launch("late", 10, (120, 5), id=1)
    document, _ = made(trace.linked())

    hold_the_rules(document)
    assert told(document, "GPU 0 stream 7") == [
        ("O", "a", 100000), ("O", "aten::mm", 100000), ("O", "gemm", 100000), ("C", "gemm", 110000),
        ("O", "gemm", 110000), ("C", "gemm", 115000), ("C", "aten::mm", 115000), ("C", "a", 115000),
        ("O", "a", 120000), ("O", "aten::mm", 120000), ("O", "late", 120000), ("C", "late", 125000),
        ("C", "aten::mm", 125000), ("C", "a", 125000),
    ]  # fmt: skip


def test_what_overlaps_in_part_is_cut_and_counted():
    trace = TraceBuilder().op("first", 0, 10).op("over", 5, 10).kernel("one", 0, 10).kernel("two", 8, 10)
    trace.kernel("within", 9, 1)
    document, num_cut = made(trace.linked())

    hold_the_rules(document)
    assert num_cut == 3
    assert ("C", "over", 10000) in told(document, "thread 0")
    assert told(document, "GPU 0 stream 7")[2:4] == [("O", "two", 10000), ("C", "two", 18000)]


def test_a_trace_with_nothing_in_the_part_is_still_a_file():
    document, _ = made(TraceBuilder().step(1, 0, 10).linked(), module="none")
    hold_the_rules(document)


@needs_traces
@pytest.mark.parametrize("name", ["h200/gpt2_eager", "public/qwen0.5b_h100_stacks"])
def test_the_time_of_a_stream_is_the_sum_of_its_work(name):
    linked = link(read_trace(TRACES / f"{name}.json.gz", workers=1))
    document, num_cut = made(linked)

    hold_the_rules(document)
    events = told(document, "GPU 0 stream 7")
    kernels = sum(1 for kind, *_ in events if kind == "O")
    assert kernels >= linked.device.height
    depth, since, busy = 0, 0, 0
    for kind, _, at in events:
        depth += 1 if kind == "O" else -1
        if kind == "O" and depth == 1:
            since = at
        elif not depth:
            busy += at - since
    work = int(linked.device["duration_ns"].sum())
    assert busy == work if not num_cut else busy <= work
    assert busy > 0.99 * work
