"""Work by pass and name, and attention taken apart into products, softmax and the rest."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.kernels.kernels import gemm_share_by_phase
from stepscope.analysis.structure.links import link
from stepscope.analysis.time.pass_work import COPIES, MATMUL, REST, SOFTMAX, attention_parts, pass_work
from stepscope.trace.reader import read_trace

GPU_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "h200" / "gpt2_eager.json.gz"


def work(*rows):
    """(op, ns) in order of time, all of the forward; a product of several kernels is a tuple of times."""
    flat = [(op, at, each) for at, (op, ns) in enumerate(rows) for each in (ns if isinstance(ns, tuple) else (ns,))]
    names, places, times = zip(*flat)
    columns = {"op": names, "op_row": places, "name": names, "duration_ns": times}
    return pl.DataFrame(columns).with_columns(pl.lit("forward").alias("phase"))


SOFTMAX_OPS = (("aten::amax", 3), ("aten::sub", 4), ("aten::exp", 5), ("aten::sum", 6), ("aten::div", 7))
ATTENTION = (
    ("aten::bmm", 1000), ("aten::mul", 500), ("aten::copy_", 8), ("aten::bmm", (9, 1)), ("aten::div", 1),
    ("aten::where", 2), *SOFTMAX_OPS, ("aten::copy_", 20), ("aten::bmm", 11), ("aten::copy_", 2), ("aten::bmm", 1000),
)  # fmt: skip


def test_a_softmax_written_out_begins_with_its_maximum_and_ends_at_the_next_product():
    once = {MATMUL: 21, SOFTMAX: 25, REST: 3, COPIES: 30}

    assert attention_parts(work(*ATTENTION)) == once
    assert attention_parts(work(*ATTENTION, *ATTENTION)) == {part: 2 * ns for part, ns in once.items()}


def test_the_backward_and_the_softmax_of_a_loss_are_not_counted():
    backward = work(*ATTENTION).with_columns(pl.lit("backward").alias("phase"))

    assert sum(attention_parts(backward).values()) == 0
    assert sum(attention_parts(work(("aten::bmm", 9), *SOFTMAX_OPS)).values()) == 0
    assert sum(attention_parts(work(*SOFTMAX_OPS, ("aten::bmm", 9))).values()) == 0


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
