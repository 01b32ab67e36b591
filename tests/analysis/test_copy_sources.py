"""Where copies come from: of the host, of a GPU, and what autocast casts of weights, exact to the byte."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.kernels.copy_sources import CAUSES, copy_sources, copy_summary, weight_casts
from stepscope.analysis.structure.links import link
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, TraceBuilder, needs_traces


def copying(target, source, shape, strides=None):
    dtypes = {"bf16": "c10::BFloat16", "fp32": "float"}
    given = {"Input Dims": [shape, shape, []], "Input type": [dtypes[target], dtypes[source], "Scalar"]}
    return {**given, "Input Strides": strides or [[shape[-1], 1], [shape[-1], 1], []]}


def linear_under_autocast() -> TraceBuilder:
    """Autocast casts weight [8, 4], bias [8] and input [2, 4] of a linear; then a contiguous is called."""
    trace = TraceBuilder().step(1, 0, 200)
    trace.op("aten::linear", 10, 60, **{"Input Dims": [[2, 4], [8, 4], [8]], "Input type": ["float"] * 3})
    for start, shape in ((12, [2, 4]), (22, [8, 4]), (32, [8])):
        strides = None if len(shape) > 1 else [[1], [1], []]
        trace.op("aten::to", start, 8).op("aten::_to_copy", start + 1, 6)
        trace.op("aten::copy_", start + 2, 4, **copying("bf16", "fp32", shape, strides))
    trace.op("aten::contiguous", 100, 20).op("aten::clone", 101, 18)
    trace.op("aten::copy_", 105, 10, **copying("fp32", "fp32", [16, 16], [[16, 1], [1, 16], []]))
    return trace


def test_a_cast_of_a_weight_an_input_and_a_call_of_the_programs_are_told_apart():
    sources = copy_sources(linear_under_autocast().linked())

    told = sources.select("cause", "op", "root_op", pl.col("what").cast(pl.String), "written_bytes").rows()
    assert told == [
        ("mixed_dtypes", "aten::to", "aten::linear", "cast", 16),
        ("autocast_weight", "aten::to", "aten::linear", "cast", 64),
        ("autocast_weight", "aten::to", "aten::linear", "cast", 16),
        ("called", "aten::contiguous", "aten::contiguous", "layout", 1024),
    ]
    assert set(sources["cause"]) <= set(CAUSES)
    assert sources["duration_ns"].to_list() == [4000, 4000, 4000, 10_000]


def test_a_source_is_summed_a_step_and_keeps_its_events():
    sources = copy_sources(linear_under_autocast().linked())
    table = copy_summary(sources, 2, 110_000)

    first = table.row(0, named=True)
    assert (first["op"], first["num_calls"], first["total_ns"]) == ("aten::contiguous", 0.5, 5000.0)
    assert table["total_ns"].sum() == 11_000
    assert table["share"].sum() == pytest.approx(0.1)
    assert sum(len(events) for events in table["events"]) == 4


def test_weights_are_counted_once_and_casts_are_half_their_bytes():
    sources = copy_sources(linear_under_autocast().linked())

    assert weight_casts(sources, 1) == (160, 80, 80)
    assert weight_casts(sources.clear(), 1) == (0, 0, 0)


@needs_traces
def test_autocast_of_gpt2_casts_every_weight_of_a_product_to_half_its_bytes():
    path = Path(TRACES) / "h200" / "gpt2_eager.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    linked = link(read_trace(path))
    sources = copy_sources(linked).filter(pl.col("step").is_not_null())

    # Of 124,439,808 parameters all but the positions [1024, 768] and 25 norms' weight and bias [768].
    weight_bytes = 4 * (124_439_808 - 1024 * 768 - 25 * 2 * 768)
    assert weight_casts(sources, linked.steps.num) == (weight_bytes, weight_bytes // 2, weight_bytes // 2)


def test_autocast_on_a_cpu_casts_each_parameter_to_half_its_bytes(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
        record_function("ProfilerStep#0"),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.randn(3, 8))
        out.float().sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    with gzip.open(tmp_path / "trace.json.gz", "wt") as stream:
        json.dump(json.loads((tmp_path / "trace.json").read_text()), stream)
    sources = copy_sources(link(read_trace(tmp_path / "trace.json.gz")))

    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weight_casts(sources, 1) == (parameter_bytes, parameter_bytes // 2, parameter_bytes // 2)
    back = sources.filter(pl.col("cause") == "autocast_gradient")
    assert back["written_bytes"].sum() == parameter_bytes
