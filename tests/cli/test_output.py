"""Printing an answer: JSON is made of plain values, and what is none is a bug that shows."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from handmade import cpu_recording
from parametrized import parametrized
from stepscope import read
from stepscope.cli.support.output import print_result, write
from stepscope.session import open_session
from trace_builder import PUBLIC, TRACES, needs_traces


@pytest.mark.parametrize("value", [Path("a"), {1, 2}, b"bytes", object(), float("nan")])
def test_what_is_no_json_value_is_not_made_one_in_silence(value):
    with pytest.raises((TypeError, ValueError)):
        print_result(lambda: {"value": value}, lambda color, width: "", True, io.StringIO())


def test_a_card_is_made_of_plain_values(tmp_path):
    stream = io.StringIO()
    card = read(cpu_recording(tmp_path / "run"))
    print_result(card.to_json, lambda color, width: str(card), True, stream)

    assert json.loads(stream.getvalue())["recording"] == str(tmp_path / "run")


@needs_traces
@parametrized(
    "path",
    [
        TRACES / "h200" / "contiguous_copies.json.gz",
        PUBLIC / "cpu_only_gloo.json.gz",
        PUBLIC / "event_sync_multi_stream_a100.json.gz",
        PUBLIC / "triton_mi300.json.gz",
        PUBLIC / "dlrm_8ranks_v100",
    ],
    quick=2,
    ids=lambda path: path.name,
)
def test_an_analysis_is_made_of_plain_values(path):
    stream = io.StringIO()
    analysis = open_session(path, use_cache=False).analyze()
    print_result(lambda: analysis.to_json(5), lambda color, width: "", True, stream)

    assert json.loads(stream.getvalue()) == analysis.to_json(5)


def test_what_an_encoding_cannot_say_is_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write(["a", "é\n"], stream)

    assert stream.buffer.getvalue() == b"a?\n"


def test_bars_stay_bars_where_there_is_only_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")

    assert write(["▁▄█ 5 µs …"], stream)
    assert raw.getvalue() == b"_=# 5 us ..."


def test_a_closed_pipe_is_told_from_one_that_is_read(tmp_path):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        assert write(["one\n"], stream)
        os.close(reading)
        assert not write(["two\n"], stream)
