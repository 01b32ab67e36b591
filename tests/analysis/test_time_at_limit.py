"""How much of the time of each class of kernels its limits explain."""

from __future__ import annotations

import pytest

from stepscope.analysis.costs.roofline import time_at_limit
from stepscope.analysis.ranks.rank_account import account
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, TraceBuilder, needs_traces

H200 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}


def test_a_class_has_what_its_ops_would_take_at_their_limit():
    # GIVEN a product of 1024³ in bf16 that runs 100 times as long as its FLOPs at the peak, and a kernel of no op
    square = [1024, 1024]
    limit_us = 2 * 1024**3 / 989.4e12 * 1e6
    args = {"Input Dims": [square, square], "Input type": ["c10::BFloat16"] * 2}
    trace = TraceBuilder(**H200).op("aten::mm", 0, 5, **args).launch("gemm_kernel", 1, (10, round(100 * limit_us, 3)))
    found = trace.kernel("what_nobody_knows", 500, 7).account()

    rows = {row["class"]: row for row in time_at_limit(found.roofline, found.top_kernels).to_dicts()}

    gemm = rows["gemm"]
    assert gemm["at_limit_ns"] == pytest.approx(1000 * limit_us, abs=1)
    assert gemm["above_limit_ns"] == gemm["total_ns"] - gemm["at_limit_ns"] and gemm["unknown_ns"] == 0
    assert rows["other"] == {
        "class": "other", "total_ns": 7000, "at_limit_ns": 0, "above_limit_ns": 0, "unknown_ns": 7000
    }  # fmt: skip


@needs_traces
def test_of_a_real_trace_the_classes_add_up_to_the_summary():
    found = account(read_trace(TRACES / "h200" / "gpt2_eager.json.gz"), 0)
    table, summary = time_at_limit(found.roofline, found.top_kernels), found.roofline_summary

    assert table["total_ns"].sum() == summary.total_ns
    assert table["unknown_ns"].sum() == summary.unknown_ns
    assert (table["at_limit_ns"] + table["above_limit_ns"] + table["unknown_ns"]).to_list() == table[
        "total_ns"
    ].to_list()
    placed_ns = summary.total_ns - summary.unknown_ns
    assert table["at_limit_ns"].sum() / placed_ns == pytest.approx(summary.limit_share, rel=1e-5)
