"""Work by pass and name, and attention taken apart into products, softmax and the rest."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.kernels import gemm_share_by_phase
from stepscope.analysis.links import link
from stepscope.analysis.pass_work import COPIES, MATMUL, REST, SOFTMAX, attention_parts, pass_work
from stepscope.trace.reader import read_trace

GPU_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "h200" / "gpt2_eager.json.gz"


def work(*rows):
    """(module, op, ns) in order of time, all of the forward."""
    names = [op for _, op, _ in rows]
    return pl.DataFrame(
        {
            "module": [module for module, _, _ in rows],
            "op": names,
            "name": names,
            "phase": ["forward"] * len(rows),
            "duration_ns": [ns for *_, ns in rows],
        },
        schema_overrides={"module": pl.String},
    )


def test_a_softmax_written_out_begins_with_its_maximum_and_ends_at_the_next_product():
    inside = "blocks.0.attention"
    rows = [
        (f"{inside}.query", "aten::bmm", 1000), (inside, "aten::bmm", 10), (inside, "aten::div", 1),
        (inside, "aten::where", 2), (inside, "aten::amax", 3), (inside, "aten::sub", 4), (inside, "aten::exp", 5),
        (inside, "aten::sum", 6), (inside, "aten::div", 7), (inside, "aten::copy_", 20), (inside, "aten::bmm", 11),
        (f"{inside}.output", "aten::bmm", 1000), ("blocks.1.attention", "aten::div", 30), (None, "aten::exp", 1000),
    ]  # fmt: skip

    assert attention_parts(work(*rows)) == {MATMUL: 21, SOFTMAX: 25, REST: 33, COPIES: 20}


def test_the_backward_and_other_modules_are_not_counted():
    backward = work(("a.attention", "aten::amax", 5)).with_columns(pl.lit("backward").alias("phase"))

    assert sum(attention_parts(backward).values()) == 0
    assert sum(attention_parts(work(("a.attention_norm", "aten::amax", 5))).values()) == 0


@pytest.mark.skipif(not GPU_TRACE.is_file(), reason="the traces of the H200 are not here")
def test_of_a_gpu_it_is_every_kernel_with_its_class():
    linked = link(read_trace(GPU_TRACE))
    found = pass_work(linked)

    assert found.height == linked.device.height and found["duration_ns"].sum() == linked.device["duration_ns"].sum()
    assert set(found.filter(pl.col("name").str.starts_with("nvjet"))["class"]) == {"gemm"}


def test_without_a_gpu_it_is_ops_with_their_own_time(tmp_path):
    path = tmp_path / "trace.json"
    op = '{{"ph":"X","cat":"cpu_op","name":"{}","pid":1,"tid":1,"ts":{},"dur":{}}}'
    events = [op.format("aten::matmul", 0, 10), op.format("aten::mm", 2, 6), op.format("aten::add", 20, 3)]
    path.write_text('{"traceEvents":[' + ",".join(events) + "]}")

    found = pass_work(link(read_trace(path)))

    assert found.select("name", "class", "duration_ns").rows() == [
        ("aten::matmul", "other", 4000), ("aten::mm", "gemm", 6000), ("aten::add", "other", 3000),
    ]  # fmt: skip
    assert gemm_share_by_phase(found)["gemm_ns"].sum() == 6000
