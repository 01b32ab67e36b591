"""The sections `attention` and `copies`: every call and every source is a row, with its reason and its saving."""

from __future__ import annotations

import dataclasses

import pytest

from stepscope.document.model import Bars, Table, Text
from stepscope.document.sections import attention, copies
from stepscope.errors import Unavailable
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from trace_builder import TraceBuilder

SIZES, HALF = [2, 4, 64, 16], "c10::BFloat16"


@pytest.fixture
def source(tmp_path):
    trace = TraceBuilder(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    for step, start in ((1, 0), (2, 200)):
        shapes = {"Input Dims": [SIZES, SIZES, SIZES, [64, 64]], "Input type": [HALF, HALF, HALF, "bool"]}
        trace.step(step, start, 190).op("aten::scaled_dot_product_attention", start + 10, 40, **shapes)
        trace.op("aten::_scaled_dot_product_efficient_attention", start + 12, 30, id=start + 1, **shapes)
        trace.launch("fmha_cutlassF", start + 15, (start + 20, 30), id=start + 1)
        given = {"Input Dims": [[16, 16], [16, 16], []], "Input type": ["float", "float", "Scalar"]}
        trace.op("aten::clone", start + 100, 20)
        trace.op("aten::copy_", start + 105, 10, id=start + 2, **given)
        trace.launch("elementwise_copy_kernel", start + 106, (start + 110, 20), id=start + 2)
    return open_session(trace.write(tmp_path / "trace.json"), use_cache=False)


def of(parts, kind, id=None):
    return next(part for part in parts if isinstance(part, kind) and (id is None or part.id == id))


def test_attention_has_its_calls_and_its_reasons(source):
    parts = attention.parts(source)

    calls = of(parts, Table, "attention_calls").columns
    assert (calls["back_end"], calls["mask"], calls["num_calls"]) == (["efficient"], ["64×64"], [1.0])
    assert calls["forward_ns"] == [30_000.0]
    why = of(parts, Table, "attention_reasons").columns
    assert why["because"] == ["a mask of shape 64×64 is passed (flash supports only is_causal=True)"]
    assert why["source"] == ["derived"]
    assert of(parts, Bars).series[0].y == [30_000.0]
    assert why["call"] == ["efficient 2×4×64×64×16"] and why["not_on"] == ["flash"]
    assert "1 on efficient" in of(parts, Text).text


def test_copies_have_their_source_and_their_saving(source):
    parts = copies.parts(source)

    table = of(parts, Table, "copy_sources").columns
    assert (table["op"], table["cause"], table["total_ns"]) == (["clone"], ["called"], [20_000.0])
    assert table["bytes"] == [2048.0]
    assert table["saving_ns"][0] > 0
    assert of(parts, Text).text.startswith("1 copies per step take 20.00 µs")


def test_the_screen_of_copies_has_module_and_line_below_what_was_called(source):
    report = source.copies
    where = {"module": "blocks.*.a_long_name_of_a_module", "caller": "model.py(12): a_long_name_of_a_function"}
    moved = dataclasses.replace(report, rows=tuple({**row, **where} for row in report.rows))
    lines = terminal_text(copies.copies_document(moved), 80).splitlines()

    place = next(number for number, line in enumerate(lines) if where["module"] in line)
    assert "clone" in lines[place - 1]
    assert where["caller"] in " ".join(" ".join(lines[place : place + 2]).split())


def test_a_trace_without_either_says_so(tmp_path):
    source = open_session(
        TraceBuilder().step(1, 0, 50).op("aten::mm", 10, 10).write(tmp_path / "t.json"), use_cache=False
    )

    with pytest.raises(Unavailable, match="no scaled_dot_product_attention"):
        attention.parts(source)
    with pytest.raises(Unavailable, match="No copy"):
        copies.parts(source)
