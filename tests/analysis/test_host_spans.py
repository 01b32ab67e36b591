"""The host's time by module beside the GPU work it launched: exact on a step written by hand."""

from __future__ import annotations

import pytest

from stepscope.analysis.structure.host_spans import host_spans
from trace_builder import TraceBuilder


def a_trace() -> TraceBuilder:
    """Two steps alike: two small norms of many ops, one product that keeps the GPU busier than the host."""
    trace = TraceBuilder()
    for number, start in enumerate((0, 1000)):
        trace.step(number, start, 900).annotation("stepscope.phase/forward", start, 800)
        for block, at in enumerate((start + 10, start + 110)):
            trace.annotation(f"stepscope.module/blocks.{block}.norm", at, 90)
            for place in (at + 10, at + 40):
                trace.op("aten::mul", place, 20).op("aten::empty", place + 1, 2)
                trace.launch("small", place + 5, (place + 12, 3), took=4)
        trace.annotation("stepscope.module/head", start + 300, 60).op("aten::mm", start + 310, 40)
        trace.launch("gemm", start + 320, (start + 330, 400), took=4)
    return trace


def test_modules_that_differ_in_a_number_are_one_and_every_figure_is_of_a_step():
    rows = {row["module"]: row for row in host_spans(a_trace().linked()).to_dicts()}
    norm, head = rows["blocks.*.norm"], rows["head"]

    assert norm == {
        "module": "blocks.*.norm", "phase": "forward", "num_ops": 4, "num_kernels": 4, "host_ns": 180_000,
        "device_ns": 12_000, "uncovered_ns": 168_000,
    }  # fmt: skip
    assert (head["num_ops"], head["num_kernels"], head["host_ns"], head["device_ns"]) == (1, 1, 60_000, 400_000)
    assert head["uncovered_ns"] == 0  # the GPU is the busier one


def test_where_the_host_is_longest_ahead_of_the_gpu_comes_first_and_nothing_is_lost():
    linked = a_trace().linked()
    table = host_spans(linked)

    assert table["uncovered_ns"].to_list() == sorted(table["uncovered_ns"], reverse=True)
    assert 2 * table["device_ns"].sum() == pytest.approx(linked.device["duration_ns"].sum())


def test_a_trace_without_modules_is_one_row_a_phase():
    trace = TraceBuilder().step(0, 0, 100).op("aten::mm", 10, 20).launch("gemm", 12, (30, 40))

    rows = host_spans(trace.linked()).select("module", "phase", "num_kernels").rows()

    assert {module for module, _, _ in rows} == {None} and len({phase for _, phase, _ in rows}) == len(rows)
    assert sum(num_kernels for _, _, num_kernels in rows) == 1
