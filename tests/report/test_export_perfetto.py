"""`stepscope export … perfetto`: the file keeps the format's rules, and reads back as the trace it was made from."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from parametrized import parametrized
from stepscope.analysis.structure.links import Linked, link
from stepscope.exporters.perfetto import LARGEST_EXACT_NS, perfetto_texts
from stepscope.exporters.selection import select
from stepscope.exporters.tracks import lanes
from stepscope.findings.finding import Finding
from stepscope.render.files import write_texts
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import DEVICE_TABLE
from stepscope.trace.tables import HOST as HOST_TABLE
from trace_builder import AUTOGRAD, PUBLIC, TRACES, TraceBuilder, needs_traces

NASTY = '<script>alert("1")</script>\n\u202e</script>\x00=1+1' + "x" * 3000


def training(start: float = 0.0, name: str = "gemm") -> TraceBuilder:
    """Two steps of two modules with a backward; the second step's kernels are a nanosecond longer."""
    trace = TraceBuilder(distributedInfo={"rank": 3, "world_size": 8})
    trace.raw(ph="M", name="process_name", pid=1, tid=0, args={"name": "python"})
    trace.raw(ph="M", name="thread_name", pid=1, tid=1, args={"name": "main"})
    for number in (5, 6):
        at = start + 1000 * (number - 5)
        sequence = 10 * number
        trace.step(number, at, 900)
        for place, module in enumerate(("a", "b")):
            begin = at + 10 + 100 * place
            trace.annotation(f"stepscope.module/{module}", begin, 80)
            trace.op("aten::mm", begin + 5, 20, id=sequence + place, sequence=sequence + place, shapes=None,
                     **{"Input Dims": [[8, 4], []], "Input type": ["float", NASTY]})  # fmt: skip
            trace.launch(name, begin + 6, (begin + 200, 40.001 if number == 6 else 40), id=sequence + place)
        for place in (1, 0):
            begin = at + 400 + 100 * (1 - place)
            back = {"sequence": sequence + place, "forward_thread": 1, "id": sequence + 5 + place}
            trace.op("autograd::engine::evaluate_function: MmBackward0", begin, 60, AUTOGRAD, **back)
            trace.op("aten::mm", begin + 5, 20, AUTOGRAD, id=sequence + 7 + place)
            trace.launch("gemm_backward", begin + 6, (begin + 100, 90), thread=AUTOGRAD, id=sequence + 7 + place)
        trace.memory(at + 20, 512).memory(at + 600, -512)
    return trace


def exported(linked: Linked, folder: Path, findings: tuple[Finding, ...] = (), **asked: object) -> tuple[dict, Path]:
    path = folder / "out.json.gz"
    write_texts(path, perfetto_texts(select(linked, **asked), findings))
    return json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal), path


def hold_the_rules(document: dict) -> None:
    """The Chrome trace format's rules, as its two viewers need them."""
    tracks: dict[tuple, list[tuple[int, int]]] = {}
    flows: dict[tuple, list[str]] = {}
    named = set()
    for event in document["traceEvents"]:
        assert event["ph"] in "XMiCsf" and isinstance(event["name"], str)
        assert isinstance(event["pid"], (int, str))
        assert 0 <= event["ts"] * 1000 < LARGEST_EXACT_NS
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"], event["cat"] == "stepscope"), []).append(
                (int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000))
            )
        elif event["ph"] in "sf":
            flows.setdefault((event["cat"], event["name"], event["id"]), []).append(event["ph"])
            assert event["ph"] == "s" or event["bp"] == "e"
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        elif event["ph"] == "M" and event["name"] in ("thread_name", "process_name"):
            named.add((event["pid"], event["tid"]) if event["name"] == "thread_name" else event["pid"])
    assert all(ends == ["s", "f"] for ends in flows.values())
    for (pid, tid, is_ours), bars in tracks.items():
        assert pid in named and (pid, tid) in named
        if is_ours or any(label(document, pid, tid, word) for word in ("stream",)):
            assert set(lanes(*zip(*sorted(bars, key=lambda bar: (bar[0], -bar[1]))))) == {0}, (pid, tid)


def label(document: dict, pid: object, tid: object, word: str) -> bool:
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"
             and (e["pid"], e["tid"]) == (pid, tid)]  # fmt: skip
    return any(name.startswith(word) for name in names)


def track(document: dict, name: str) -> list[tuple[str, float, float]]:
    where = [
        (e["pid"], e["tid"]) for e in document["traceEvents"] if e["ph"] == "M" and e["args"].get("name") == name
    ]
    return [(e["name"], float(e["ts"]), float(e["dur"])) for e in document["traceEvents"] if e["ph"] == "X"
            and (e["pid"], e["tid"]) in where]  # fmt: skip


DEVICE = [*(name for name in DEVICE_TABLE.schema if name != "event"), "class", "module", "op_name"]
NUMBERED_ANEW = ("event", "thread", "parent", "self_ns")
HOST = [*(name for name in HOST_TABLE.schema if name not in NUMBERED_ANEW), "module"]
TEXT = pl.selectors.categorical() | pl.selectors.enum()


def compared(frame: pl.DataFrame, columns: list[str], shift_ns: int = 0) -> pl.DataFrame:
    shifted = frame.with_columns(pl.col("start_ns") - shift_ns).select(columns).with_columns(TEXT.cast(pl.String))
    return shifted.sort("start_ns", "duration_ns", "name", "external_id", "correlation")


def links_of(linked: Linked, shift_ns: int = 0) -> pl.DataFrame:
    """Each piece of GPU work with the start of its launch and of its op, and of the op's forward."""
    host, device = linked.host, linked.device
    return device.select(
        pl.col("start_ns") - shift_ns,
        pl.col("name").cast(pl.String),
        (host["start_ns"].gather(device["launch"]) - shift_ns).alias("launch"),
        (host["start_ns"].gather(device["op"]) - shift_ns).alias("op"),
        (host["start_ns"].gather(host["forward"].gather(device["op"])) - shift_ns).alias("forward"),
    ).sort("start_ns", "name", "launch")


def check_round_trip(linked: Linked, folder: Path, **asked: object) -> dict:
    """The kept part reads back with the same events and links."""
    selection = select(linked, **asked)
    document, path = exported(linked, folder, **asked)
    again = link(read_trace(path, workers=1))
    shift = document["baseTimeNanoseconds"] - linked.trace.facts.base_time_ns
    assert again.trace.num_problems == 0
    assert_frame_equal(compared(again.device, DEVICE), compared(selection.device, DEVICE, shift))
    theirs = again.host.filter(~(again.host["kind"] == "other"))
    ours = selection.host.filter(~(selection.host["kind"] == "other"))
    assert_frame_equal(compared(theirs, HOST), compared(ours, HOST, shift))
    kept = linked.device.filter(pl.col("event").is_in(selection.device["event"].implode()))
    assert_frame_equal(links_of(again), links_of(replace(linked, device=kept), shift))
    assert again.memory.height == selection.memory.height
    assert again.memory["bytes"].to_list() == selection.memory["bytes"].to_list()
    return document


@parametrized("asked", [{}, {"step": 6}, {"module": "b"}, {"step": 5, "module": "a"}], quick=2)
def test_it_reads_back_as_it_was(tmp_path, asked):
    hold_the_rules(check_round_trip(training().linked(), tmp_path, **asked))


def test_a_step_has_its_events_and_no_others(tmp_path):
    document, _ = exported(training().linked(), tmp_path, step=6)

    kernels = [
        (e["name"], float(e["ts"]), float(e["dur"])) for e in document["traceEvents"] if e.get("cat") == "kernel"
    ]
    assert kernels == [("gemm", 1210.0, 40.001), ("gemm", 1310.0, 40.001), ("gemm_backward", 1500.0, 90.0),
                       ("gemm_backward", 1600.0, 90.0)]  # fmt: skip
    assert track(document, "steps") == [("step 6", 1000.0, 900.0)]
    assert document["stepscope"]["step"] == 6


def test_a_module_has_its_calls_its_backward_its_kernels_and_its_launches(tmp_path):
    document, _ = exported(training().linked(), tmp_path, module="b", step=5)

    names = sorted(e["name"] for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] != "stepscope")
    assert names == [
        "ProfilerStep#5", "aten::mm", "aten::mm", "autograd::engine::evaluate_function: MmBackward0",
        "cudaLaunchKernel", "cudaLaunchKernel", "gemm", "gemm_backward", "stepscope.module/b",
    ]  # fmt: skip
    flows = [e["cat"] for e in document["traceEvents"] if e["ph"] == "s"]
    assert sorted(flows) == ["ac2g", "ac2g", "fwdbwd"]
    assert track(document, "modules, main") == [("b", 110.0, 80.0)]
    assert track(document, "modules, GPU 0 stream 7") == [("b", 310.0, 40.0), ("b (backward)", 500.0, 90.0)]


def test_our_tracks_tell_phases_modules_findings_and_memory(tmp_path):
    finding = Finding(sentence=NASTY, fix="do it", evidence=(), falsified_by="", saving_ns=2e6, id="launch_bound",
                      places=((300_000, 420_000), (100_000, 320_000)), upper_bound=True)  # fmt: skip
    document, _ = exported(training().linked(), tmp_path, (finding,))

    hold_the_rules(document)
    assert [name for name, *_ in track(document, "phases")] == [
        "other", "forward", "backward", "other", "forward", "backward", "other",
    ]  # fmt: skip
    assert [name for name, *_ in track(document, "modules, main")] == ["a", "b", "a", "b"]
    assert track(document, "finding: launch_bound") == [("launch_bound", 100.0, 220.0)]
    assert track(document, "finding: launch_bound (2)") == [("launch_bound", 300.0, 120.0)]
    args = next(e["args"] for e in document["traceEvents"] if e["name"] == "launch_bound")
    assert args["sentence"] == NASTY and args["saving"] == "up to 2.00 ms per step" and args["saving_ns"] == 2e6
    levels = [(e["name"], e["ts"], e["args"]["bytes"]) for e in document["traceEvents"] if e["ph"] == "C"]
    assert levels[0] == ("memory allocated cuda:0", 20.0, (1 << 20) - 512)


def test_work_that_overlaps_on_a_stream_gets_a_track_of_its_own(tmp_path):
    trace = TraceBuilder().kernel("one", 0, 10).kernel("two", 9.999, 10).kernel("three", 30, 1)
    document, _ = exported(trace.linked(), tmp_path)

    hold_the_rules(document)
    assert [name for name, *_ in track(document, "stream 7")] == ["one", "three"]
    assert [name for name, *_ in track(document, "stream 7 (2)")] == ["two"]


def test_a_module_ends_on_a_stream_where_the_next_begins(tmp_path):
    trace = TraceBuilder()
    for number, module in enumerate("ab"):
        trace.annotation(f"stepscope.module/{module}", 20 * number, 15).op(
            "aten::mm", 20 * number + 1, 9, id=number + 1
        )
        trace.launch("gemm", 20 * number + 2, (100 + 9 * number, 10), id=number + 1)
    document, _ = exported(trace.linked(), tmp_path)

    hold_the_rules(document)
    assert track(document, "modules, GPU 0 stream 7") == [("a", 100.0, 9.0), ("b", 109.0, 10.0)]


def test_names_are_text_whatever_is_in_them(tmp_path):
    document = check_round_trip(training(name=NASTY).linked(), tmp_path)

    assert NASTY in {e["name"] for e in document["traceEvents"]}


def test_a_clock_since_1970_is_moved_so_that_no_nanosecond_is_lost(tmp_path):
    start = 1_694_128_201_545_123.0  # microseconds: a double has a quarter of one left
    document = check_round_trip(training(start).linked(), tmp_path)

    hold_the_rules(document)
    assert document["baseTimeNanoseconds"] == 1_694_128_201_000_000_000
    assert min(e["ts"] for e in document["traceEvents"] if e["ph"] == "X") == 545_123


def test_a_process_with_the_number_of_a_device_stays_apart(tmp_path):
    trace = TraceBuilder().op("aten::mm", 0, 10, id=1).launch("gemm", 1, (20, 5), id=1, device=1)
    document = check_round_trip(trace.linked(), tmp_path)

    kinds = {e["cat"]: e["pid"] for e in document["traceEvents"] if e["ph"] == "X"}
    assert kinds["cpu_op"] == 1 and kinds["kernel"] != 1


def test_the_same_trace_makes_the_same_file_and_nothing_is_left_of_a_broken_one(tmp_path):
    linked = training().linked()
    first = exported(linked, tmp_path)[1].read_bytes()
    assert exported(linked, tmp_path)[1].read_bytes() == first

    def broken():
        yield "{"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_texts(tmp_path / "out.json.gz", broken())
    assert (tmp_path / "out.json.gz").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["out.json.gz"]


@needs_traces
@parametrized(
    "path",
    [
        TRACES / "h200" / "gpt2_eager.json.gz",
        PUBLIC / "qwen0.5b_h100_stacks.json.gz",
        PUBLIC / "mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        PUBLIC / "event_sync_multi_stream_a100.json.gz",
        PUBLIC / "gpu_user_annotation_gp100.json.gz",
    ],
    quick=2,
    ids=lambda path: path.name,
)
def test_real_traces_read_back(tmp_path, path):
    hold_the_rules(check_round_trip(link(read_trace(path, workers=1)), tmp_path))


@needs_traces
def test_a_module_of_a_trace_with_stacks_keeps_its_name(tmp_path):
    linked = link(read_trace(PUBLIC / "qwen0.5b_h100_stacks.json.gz", workers=1))
    module = "Qwen2Model_0.Qwen2DecoderLayer_3.Qwen2Attention_3"
    document = check_round_trip(linked, tmp_path, module=module)

    hold_the_rules(document)
    assert any(name == module for name, *_ in track(document, "modules, thread 25286 (python3)"))
