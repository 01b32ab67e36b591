"""Kernels of compiled code by module: as Inductor tells, else by the compiled region, never nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.structure.links import link
from stepscope.border import fields_that_fit
from stepscope.trace.compile_file import SCHEMA
from stepscope.trace.find import find_traces, open_ranks
from trace_builder import AUTOGRAD, TraceBuilder

H200 = Path(__file__).parents[3] / "shared" / "traces" / "h200"


def training(region: str = "Torch-Compiled Region: 0/0") -> TraceBuilder:
    """A compiled forward with two products and a fused kernel, its backward, and an optimizer."""
    trace = TraceBuilder().step(1, 0, 200).op(region, 10, 60).op("CompiledFunction", 12, 56, id=1, sequence=7)
    trace.annotation("## Call CompiledFxGraph fkey ##", 14, 50)
    for number, (name, kernel) in enumerate([("aten::mm", "gemm"), ("triton_f", "triton_f"), ("aten::mm", "gemm")]):
        trace.op(name, 20 + 10 * number, 8, id=10 + number)
        trace.launch(kernel, 22 + 10 * number, (24 + 10 * number, 5), id=10 + number)
    trace.op("CompiledFunctionBackward", 80, 40, AUTOGRAD, id=30, sequence=7, forward_thread=1)
    trace.annotation("## Call CompiledFxGraph bkey ##", 82, 36, AUTOGRAD)
    trace.op("aten::mm", 84, 8, AUTOGRAD, id=31).launch("gemm_b", 86, (90, 5), id=31, thread=AUTOGRAD)
    trace.annotation("Optimizer.step#SGD.step", 130, 40).op("aten::add_", 135, 10, id=40)
    return trace.launch("add", 137, (140, 5), id=40)


COMPILER = {
    "num_compiles": 1,
    "regions": {"0/0": "forward (/me/model.py:12)"},
    "compiled_calls": [
        {"key": "fkey", "calls": [["aten::mm", "blocks.0.up"], ["triton_f", "blocks.0"], ["aten::mm", None]]},
        {"key": "bkey", "calls": [["aten::mm", "blocks.0.up"]]},
    ],
}


def modules_of(linked) -> list[tuple[str, str | None]]:
    return list(linked.device.select(pl.col("name", "module").cast(pl.String)).iter_rows())


def test_a_plain_trace_has_the_region_also_in_the_backward():
    linked = training().linked()
    region = "compiled region 0/0"

    assert modules_of(linked) == [
        ("gemm", region), ("triton_f", region), ("gemm", region), ("gemm_b", region), ("add", None),
    ]  # fmt: skip
    assert linked.modules.source == "compiled"


def test_a_graph_in_no_region_has_its_key():
    trace = TraceBuilder().step(1, 0, 100).annotation("## Call CompiledFxGraph fabcdefghijk ##", 10, 50)
    linked = trace.op("aten::mm", 20, 8, id=1).launch("gemm", 22, (24, 5), id=1).linked()

    assert modules_of(linked) == [("gemm", "compiled graph fabcdefg")]


def test_what_inductor_tells_comes_before_the_region():
    linked = link(replace(training().read(), compiler=COMPILER))

    assert modules_of(linked) == [
        ("gemm", "blocks.0.up"),
        ("triton_f", "blocks.0"),
        ("gemm", "compiled region 0/0 (forward, model.py:12)"),
        ("gemm_b", "blocks.0.up"),
        ("add", None),
    ]


@pytest.mark.parametrize("nonsense", [None, 3, [], {"compiled_calls": 1}, {"compiled_calls": [{"key": "fkey"}]}])
def test_nonsense_leaves_the_region(nonsense):
    compiler = nonsense if isinstance(nonsense, dict) else {"compiled_calls": nonsense, "regions": nonsense}
    compiler = fields_that_fit(compiler, SCHEMA, "compile.json", [])
    linked = link(replace(training().read(), compiler=compiler))

    assert {module for _, module in modules_of(linked)} == {"compiled region 0/0", None}


def test_a_module_that_was_called_around_it_has_what_nothing_is_known_of():
    trace = TraceBuilder().step(1, 0, 200).annotation("stepscope.module/Model", 5, 90)
    trace.annotation("stepscope.module/block", 8, 80).op("Torch-Compiled Region: 0/0", 10, 60)
    trace.annotation("## Call CompiledFxGraph fkey ##", 14, 50)
    for number in range(3):
        name = "triton_f" if number == 1 else "aten::mm"
        trace.op(name, 20 + 10 * number, 8, id=10 + number)
        trace.launch("kernel", 22 + 10 * number, (24 + 10 * number, 5), id=10 + number)
    linked = link(replace(trace.read(), compiler=COMPILER))

    assert [module for _, module in modules_of(linked)] == ["block.blocks.0.up", "block.blocks.0", "block"]


def test_kernels_that_a_cuda_graph_replays_are_known_by_their_names():
    trace = TraceBuilder().step(1, 0, 100).op("Torch-Compiled Region: 0/0", 10, 60)
    trace.call("cudaGraphLaunch", 20, 8, correlation=5)
    trace.kernel("triton_f", 30, 5, correlation=5).kernel("gemm", 40, 5, correlation=5)
    linked = link(replace(trace.read(), compiler=COMPILER))

    assert modules_of(linked)[0] == ("triton_f", "blocks.0")


def test_a_recording_brings_its_compile_file_along(tmp_path):
    (tmp_path / "trace").mkdir()
    path = training().write(tmp_path / "trace" / "rank0.json")
    (tmp_path / "compile.json").write_text(json.dumps(COMPILER))
    (opened,) = open_ranks(find_traces([path]), use_cache=False)

    assert opened.trace.compiler == COMPILER
    (tmp_path / "compile.json").write_text("[1")
    (opened,) = open_ranks(find_traces([path]), use_cache=False)
    assert opened.trace.compiler is None


@pytest.mark.skipif(not H200.is_dir(), reason="the traces of the H200 are not here")
def test_a_compiled_model_on_the_h200_is_in_its_region():
    (opened,) = open_ranks(find_traces([H200 / "llama_compiled.json.gz"]), use_cache=False)
    device = link(opened.trace).device
    inside = device.filter(pl.col("module").cast(pl.String) == "compiled region 0/0")

    assert inside.height == 2508 and device.height == 2538
    assert set(
        device.filter(pl.col("name").cast(pl.String).str.starts_with("triton_"))["module"].cast(pl.String)
    ) == {"compiled region 0/0"}
