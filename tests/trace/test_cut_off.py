"""A trace that a killed job left behind: every complete event is read, and what is missing is told."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from written_traces import SEED, assert_sound, in_file_order, needs_traces, read, real_trace, slice_of, text_of

from stepscope.errors import TraceError
from stepscope.trace import source
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import Trace

REAL = [
    "public/event_sync_multi_stream_a100.json.gz",
    "public/triton_mi300.json.gz",
    "public/dlrm_8ranks_v100/worker0_step_12.1694128201545.pt.trace.json.gz",
    "h200/contiguous_copies.json.gz",
]
NUM_CUTS = 60


def ends_of_events(text: str) -> list[int]:
    """Where each event of a trace ends, by another way than the reader's."""
    position = text.index("[", text.index('"traceEvents"')) + 1
    decoder = json.JSONDecoder()
    ends = []
    while True:
        position += len(text[position : position + 1000]) - len(text[position : position + 1000].lstrip(" \t\r\n,"))
        if text[position] == "]":
            return [*ends]
        _, position = decoder.raw_decode(text, position)
        ends.append(position)


def assert_complete_events(path: Path, whole: Trace, num_bytes: int, ends: list[int]) -> None:
    """The file at `path` holds the first `num_bytes` of the text of `whole`, and is read so far."""
    num_complete = sum(end <= num_bytes for end in ends)
    if num_complete == 0:
        with pytest.raises(TraceError) as caught:
            read_trace(path, workers=1)
        assert "\n" not in str(caught.value)
        return
    trace = read_trace(path, workers=1)
    assert_sound(trace)
    assert trace.num_events == num_complete
    assert len(trace.warnings) >= 1
    assert all(problem.what == "cut off" and problem.num == 1 for problem in trace.problems)
    is_there = pl.col("event") < num_complete
    assert_frame_equal(trace.device, whole.device.filter(is_there))
    assert_frame_equal(trace.memory.drop("thread"), whole.memory.filter(is_there).drop("thread"))
    columns = ("event", "kind", "name", "start_ns", "duration_ns", "correlation", "shapes")
    assert_frame_equal(
        in_file_order(trace.host).select(columns), in_file_order(whole.host.filter(is_there)).select(columns)
    )


@pytest.mark.long
@needs_traces
@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_cut_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.setattr(source, "SLICE", 1 << 18)
    text = real_trace(name)
    whole = read(tmp_path, text)
    ends = ends_of_events(text.decode())
    path = tmp_path / "cut.json"

    for number in range(NUM_CUTS):
        num_bytes = len(text) * number // NUM_CUTS + number * 37 % 100
        path.write_bytes(text[:num_bytes])
        assert_complete_events(path, whole, num_bytes, ends)


@pytest.mark.long
@needs_traces
@pytest.mark.parametrize("name", REAL)
def test_a_compressed_real_trace_cut_anywhere(tmp_path, name):
    text = real_trace(name)
    compressed = gzip.compress(text)
    whole = read(tmp_path, text)
    ends = ends_of_events(text.decode())
    path = tmp_path / "cut.json.gz"

    for number in range(1, NUM_CUTS):
        cut = compressed[: len(compressed) * number // NUM_CUTS]
        path.write_bytes(cut)
        assert_complete_events(path, whole, len(zlib.decompressobj(wbits=31).decompress(cut)), ends)


@pytest.mark.long
@pytest.mark.parametrize("indent", [None, 2])
def test_a_trace_written_by_hand_cut_everywhere(tmp_path, indent):
    text = text_of([event for event in SEED if event["ph"] not in "BE"], indent=indent)
    whole = read(tmp_path, text)
    ends = ends_of_events(text)
    path = tmp_path / "cut.json"

    for num_bytes in range(0, len(text), 41):
        path.write_bytes(text[:num_bytes].encode())
        assert_complete_events(path, whole, num_bytes, ends)


def test_the_warning_says_where_the_file_ends(tmp_path):
    text = text_of([slice_of("a"), slice_of("b", ts=20)])
    trace = read(tmp_path, text[:-20])

    assert trace.host["name"].to_list() == ["a"]
    assert trace.warnings == (
        f"the file ends at byte {len(text) - 20:,} inside its list of events, probably because the job that wrote it "
        "was killed; every complete event was read",
    )
    assert [(p.what, p.offset) for p in trace.problems] == [("cut off", text.rindex('{"ph"'))]


def test_the_fields_before_the_events_survive(tmp_path):
    assert read(tmp_path, text_of()[:-300]).facts.rank == 3


def test_a_begin_whose_end_was_cut_off_is_told(tmp_path):
    text = text_of([slice_of("a"), {"ph": "B", "ts": 1, "name": "open"}, {"ph": "E", "ts": 2}])
    trace = read(tmp_path, text[:-10])

    assert trace.host["name"].to_list() == ["a"]
    assert "1 begin or end events have no counterpart and were skipped" in trace.warnings


def test_an_appending_writer_is_read_as_far_as_it_had_come(tmp_path, monkeypatch):
    """GIVEN a file that grows while it is read THEN it ends where it ended when it was opened."""
    monkeypatch.setattr(source, "SLICE", 1000)
    path = tmp_path / "trace.json"
    text = text_of([slice_of(f"op{i}", ts=i) for i in range(100)])
    path.write_text(text[:-2])

    def append(_: float) -> None:
        with path.open("a") as stream:
            stream.write(', {"ph": "X", "ts": 1000}' * 1000)

    trace = read_trace(path, append, workers=1)

    assert trace.num_events == 100
    assert trace.warnings[0].startswith(f"the file ends at byte {len(text) - 2:,} inside")


def test_a_file_that_becomes_shorter_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "SLICE", 1000)
    path = tmp_path / "trace.json"
    path.write_text(text_of([slice_of(f"op{i}", ts=i) for i in range(100)]))

    with pytest.raises(TraceError, match=r"became shorter while it was read \(byte 2,000\)"):
        read_trace(path, lambda share: os.truncate(path, 2000), workers=1)
