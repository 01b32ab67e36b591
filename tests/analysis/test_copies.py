"""Copies: what each is, what it moves and who asked for it; exact on small traces, adding up on any."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_trace import any_trace
from parametrized import parametrized
from stepscope.analysis.kernels.copies import KINDS, copies, copies_summary
from stepscope.analysis.structure.links import link
from stepscope.analysis.time.gpu_time import gpu_time
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, TraceBuilder, needs_traces

COPY = "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
DIRECT = f"void at::native::vectorized_elementwise_kernel<4, {COPY}>"
STRIDED = f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{COPY}>>"
CASTING = f"void at::native::unrolled_elementwise_kernel<{COPY}, at::native::memory::LoadWithCast<1>>"
CAT = "void at::native::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 3>"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"


def tensors(shapes: Any, dtypes: Any = None, strides: Any = None) -> dict[str, Any]:
    """What a profiler writes of an op's operands."""
    texts = {"Input Dims": shapes, "Input type": dtypes, "Input Strides": strides}
    return {key: value for key, value in texts.items() if value is not None}


def copied(kernel: str = DIRECT, op: str = "aten::copy_", num_kernels: int = 1, **args: Any) -> pl.DataFrame:
    """The copies of a trace with one op and its kernels, 2 µs each."""
    trace = TraceBuilder().op(op, 0, 10, **args)
    for number in range(num_kernels):
        trace.launch(kernel, 1 + number, runs=(20 + 5 * number, 2))
    return copies(trace.linked())


def one(table: pl.DataFrame) -> dict[str, Any]:
    assert table.height == 1
    return table.row(0, named=True)


@parametrized(
    ("name", "what", "pageable"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "host_to_device", True),
        ("Memcpy HtoD (Pinned -> Device)", "host_to_device", False),
        ("Memcpy HtoD (Host -> Device)", "host_to_device", None),
        ("Memcpy DtoH (Device -> Pageable)", "device_to_host", True),
        ("Memcpy DtoH (Device -> Pinned)", "device_to_host", False),
        ("Memcpy DtoD (Device -> Device)", "device_to_device", None),
        ("Memcpy PtoP (Device -> Device)", "peer", None),
        ("Memcpy HtoD", "host_to_device", None),
        ("Memcpy HtoA (Pinned -> Array)", "host_to_device", False),
        ("CopyHostToDevice", "copy", None),
    ],
    quick=5,
)
def test_a_memcpys_name_says_where_to_and_from_what_memory(name, what, pageable):
    trace = TraceBuilder().kernel(name, 0, 2, category="gpu_memcpy", bytes=4000)

    row = one(copies(trace.linked()))

    assert (row["what"], row["pageable"], row["bytes"], row["op"]) == (what, pageable, 4000, None)


def test_bandwidth_of_a_copy_inside_the_device_counts_what_is_read_and_what_is_written():
    trace = TraceBuilder().kernel("Memcpy DtoD (Device -> Device)", 0, 2, category="gpu_memcpy", bytes=4000)
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 10, 2, category="gpu_memcpy", bytes=4000)

    assert copies(trace.linked())["bandwidth_bytes_per_s"].to_list() == [4e9, 2e9]


def test_rocm_calls_a_copy_to_the_host_one_inside_the_device_but_the_op_knows():
    name = "Memcpy DtoD (Device -> Device)"
    trace = TraceBuilder().op("aten::_local_scalar_dense", 0, 10)
    trace.launch(name, 1, runs=(20, 2), call="hipMemcpyWithStream", category="gpu_memcpy", bytes=1)

    row = one(copies(trace.linked()))

    assert (row["what"], row["pageable"]) == ("device_to_host", None)


@parametrized(
    ("shapes", "dtypes", "strides", "what"),
    [
        ([[8, 16], [8, 16]], ["float", "c10::BFloat16"], [[16, 1], [16, 1]], "cast"),
        ([[8, 16], [8, 16]], ["float", "c10::BFloat16"], [[16, 1], [1, 8]], "cast"),
        ([[8, 16], [8, 16]], ["float", "c10::BFloat16"], None, "cast"),
        ([[8, 16], [8, 16]], ["float", "float"], [[16, 1], [1, 8]], "layout"),
        ([[8, 16], [8, 16]], ["float", "float"], [[16, 1], [0, 1]], "layout"),
        ([[8, 16], [8, 16]], ["float", "float"], [[16, 1], [16, 1]], "copy"),
        ([[1, 16], [1, 16]], ["float", "float"], [[16, 1], [99, 1]], "copy"),
        ([[8, 16], [16]], ["float", "float"], [[16, 1], [1]], "copy"),
        ([[8, 16], [8, 16]], ["float", "float"], None, "copy"),
        (None, None, None, "copy"),
        ("nonsense", 3, {"a": 1}, "copy"),
        ([["x"], ["x"]], ["float", "float"], [[2], [1]], "copy"),
    ],
    quick=6,
)
def test_what_a_copy_changes_is_told_by_its_operands(shapes, dtypes, strides, what):
    assert one(copied(**tensors(shapes, dtypes, strides)))["what"] == what


@parametrized(
    ("kernel", "op", "what"),
    [
        (STRIDED, "aten::copy_", "layout"),
        (CASTING, "aten::copy_", "cast"),
        ("bfloat16_copy_kernel_cuda", "aten::copy_", "cast"),
        (DIRECT, "aten::contiguous", "layout"),
        (CAT, "aten::cat", "concatenate"),
        ("void cudnn::ops::nchwToNhwcKernel<float>", "aten::cudnn_convolution", "layout"),
        (FILL, "aten::fill_", "fill"),
        ("triton_poi_fused__to_copy_t_10", "triton_poi_fused__to_copy_t_10", "cast"),
        ("triton_poi_fused_clone_transpose_2", "triton_poi_fused_clone_transpose_2", "layout"),
        ("triton_poi_fused_cat_2", "triton_poi_fused_cat_2", "concatenate"),
    ],
    quick=5,
)
def test_without_shapes_names_tell_what_a_kernel_changes(kernel, op, what):
    assert one(copied(kernel, op))["what"] == what


def test_work_that_moves_nothing_is_not_a_copy():
    trace = TraceBuilder().op("aten::mm", 0, 10).launch("gemm", 1, runs=(20, 5)).kernel("ncclDevKernel", 30, 5)

    assert copies(trace.linked()).is_empty()


def test_the_op_that_somebody_called_is_named_and_who_called_it():
    # GIVEN an autocast Linear, which casts its weight three ops deep
    trace = TraceBuilder().step(4, 0, 100).annotation("stepscope.module/model.head", 1, 50)
    trace.op("aten::linear", 2, 40).op("aten::to", 3, 20).op("aten::_to_copy", 4, 15)
    trace.op("aten::copy_", 5, 10, **tensors([[8, 16], [8, 16]], ["c10::BFloat16", "float"]))
    trace.launch(CASTING, 6, runs=(60, 2))

    row = one(copies(trace.linked()))

    assert (row["op"], row["outer_op"], row["caller"]) == ("aten::copy_", "aten::to", "aten::linear")
    assert (row["module"], row["step"]) == ("model.head", 4)
    # 128 floats of 4 bytes read and as many of 2 written, in 2 µs
    assert (row["bytes"], row["duration_ns"], row["bandwidth_bytes_per_s"]) == (768, 2000, 3.84e8)


def test_what_an_op_moves_is_divided_over_its_kernels_and_adds_up():
    table = copied(num_kernels=3, **tensors([[5], [5]], ["signed char", "signed char"], [[1], [1]]))

    assert table["bytes"].to_list() == [4, 3, 3]


def test_the_bytes_of_a_concatenation_come_from_its_shapes_and_its_kernels_element():
    shapes = [[[8, 16], [8, 4]], []]

    assert one(copied(CAT, "aten::cat", **tensors(shapes, ["TensorList", "Scalar"])))["bytes"] == 2 * 160 * 2
    assert one(copied(CAT.replace("<2u>", "<16>"), "aten::cat", **tensors(shapes)))["bytes"] == 2 * 160 * 16
    assert one(copied("CatArrayBatchedCopy<float, 3>", "aten::cat", **tensors(shapes)))["bytes"] == 2 * 160 * 4
    # Of more than 30 tensors a trace has no shapes.
    assert one(copied(CAT, "aten::cat", **tensors([[], []])))["bytes"] is None
    assert one(copied("CatArrayBatchedCopy<thing, 3>", "aten::cat", **tensors(shapes)))["bytes"] is None
    assert one(copied(CAT, "aten::cat", **tensors([[["ab", 10**12]], []])))["bytes"] is None


def test_fills_are_told_apart_and_count_what_they_write():
    trace = TraceBuilder().op("aten::zeros", 0, 20).op("aten::zero_", 1, 15)
    trace.op("aten::fill_", 2, 10, **tensors([[8, 16], []], ["float", "Scalar"]))
    trace.launch(FILL, 3, runs=(30, 2)).memset(40, 1, num_bytes=64)

    table = copies(trace.linked())

    assert table["what"].to_list() == ["fill", "fill"]
    assert table["outer_op"].to_list() == ["aten::zeros", None]
    assert table["bytes"].to_list() == [512, 64]


def test_a_compiled_copy_moves_what_it_touches():
    name = "triton_poi_fused__to_copy_t_10"
    args = tensors([[4, 8], [8, 4], []], ["float", "c10::BFloat16", "Scalar"])

    assert one(copied(name, name, **args))["bytes"] == 32 * 4 + 32 * 2


def test_the_summary_groups_by_kind_op_and_module():
    # GIVEN two steps with one cast of 768 bytes in 2 µs each, and a copy from pageable memory of 10 µs
    trace = TraceBuilder().step(1, 0, 50).step(2, 50, 50)
    for start in (0, 50):
        trace.op("aten::to", start + 1, 20)
        trace.op("aten::copy_", start + 2, 10, **tensors([[8, 16], [8, 16]], ["c10::BFloat16", "float"]))
        trace.launch(CASTING, start + 3, runs=(start + 30, 2))
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 90, 10, category="gpu_memcpy", bytes=5000)
    linked = trace.linked()

    rows = copies_summary(copies(linked), linked.steps.num, gpu_time(linked.device).busy_ns).to_dicts()

    assert rows == [
        {
            "what": "host_to_device", "op": None, "caller": None, "module": None, "num_calls": 1, "num_pageable": 1,
            "total_ns": 10_000, "bytes": 5000, "bandwidth_bytes_per_s": 5e8, "num_calls_per_step": 0.5,
            "busy_share": pytest.approx(10 / 14),
        },
        {
            "what": "cast", "op": "aten::to", "caller": None, "module": None, "num_calls": 2, "num_pageable": 0,
            "total_ns": 4000, "bytes": 1536, "bandwidth_bytes_per_s": 3.84e8, "num_calls_per_step": 1.0,
            "busy_share": pytest.approx(4 / 14),
        },
    ]  # fmt: skip


def test_a_summary_of_nothing_is_empty_and_unknown_bytes_stay_unknown():
    nothing = copies_summary(copies(TraceBuilder().op("aten::mm", 0, 1).linked()), 0, 0)
    unknown = one(copies_summary(copied(), 0, 0))

    assert nothing.is_empty()
    assert (unknown["bytes"], unknown["bandwidth_bytes_per_s"]) == (None, None)
    assert (unknown["num_calls_per_step"], unknown["busy_share"]) == (None, None)


texts = st.recursive(
    st.none() | st.integers(-3, 2**70) | st.sampled_from(["float", "c10::Half", ""]),
    lambda part: st.lists(part),
    max_leaves=8,
)


@given(any_trace(), st.lists(st.tuples(texts, texts, texts), max_size=3))
def test_every_copy_is_counted_once_whatever_the_trace(builder, operands):
    for number, (shapes, dtypes, strides) in enumerate(operands):
        builder.op("aten::copy_", number, 0.5, **tensors(shapes, dtypes, strides))
        builder.launch(CAT, number + 0.1, runs=(number, 1), took=0.1)
    linked = builder.linked()

    table = copies(linked)
    summary = copies_summary(table, linked.steps.num, gpu_time(linked.device).busy_ns)

    moved = linked.device.filter((pl.col("kind") != "kernel") | pl.col("class").is_in(["copy_cast", "memset_memcpy"]))
    assert table["event"].to_list() == moved["event"].to_list()
    assert set(table["what"]) <= KINDS.keys()
    assert summary["total_ns"].sum() == table["duration_ns"].sum()
    assert summary["bytes"].sum() == table["bytes"].sum()
    assert summary["num_calls"].sum() == table.height


def real(name: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    linked = link(read_trace(TRACES / f"{name}.json.gz", workers=1))
    table = copies(linked)
    return table, copies_summary(table, linked.steps.num, gpu_time(linked.device).busy_ns)


@needs_traces
def test_the_needless_copies_of_a_real_trace_are_found():
    # GIVEN a transposition made contiguous, a dtype round trip and a clone before each of eight Linears, two steps
    table, summary = real("h200/contiguous_copies")

    rows = {(row["what"], row["op"], row["caller"]): row for row in summary.to_dicts()}
    transposed = rows["layout", "aten::contiguous", None]
    assert (transposed["num_calls_per_step"], transposed["total_ns"]) == (16.0, 13_544_384)
    assert transposed["bytes"] == 32 * 2 * 16 * 2048 * 2048 * 2
    assert round(transposed["busy_share"], 4) == 0.3267
    there, back = rows["cast", "aten::to", None], rows["cast", "aten::to", "ToCopyBackward0"]
    assert (there["num_calls"], back["num_calls"]) == (34, 30)
    cloned = rows["device_to_device", "aten::clone", None]
    assert (cloned["num_calls_per_step"], cloned["bytes"]) == (8.0, 2_147_483_648)
    assert table["bytes"].null_count() == 0


@needs_traces
def test_the_casts_of_autocast_are_found():
    table, summary = real("h200/gpt2_eager")

    by_what = dict(table.group_by("what").agg(pl.len()).iter_rows())
    assert by_what == {"cast": 686, "fill": 248, "concatenate": 26, "layout": 4, "device_to_host": 2}
    weights = summary.filter(pl.col("what") == "cast", pl.col("caller").is_in(["aten::addmm", "aten::linear"]))
    assert weights["num_calls"].sum() == 268
    assert summary.filter(pl.col("what") == "concatenate", pl.col("caller") == "SplitBackward0")["bytes"].item() == (
        24 * 2 * 3 * 8 * 1024 * 768 * 2
    )


@needs_traces
@parametrized("path", sorted(TRACES.glob("h200/*.json.gz")), quick=3, ids=lambda path: path.name)
def test_no_copy_of_a_real_trace_is_faster_than_its_memory(path):
    large = copies(link(read_trace(path, workers=1))).filter(pl.col("bytes") > 2**28)  # more than any cache holds

    assert large.filter(pl.col("bandwidth_bytes_per_s") > 4.8e12).is_empty()
