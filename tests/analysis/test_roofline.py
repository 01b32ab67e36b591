"""The roofline: FLOPs, bytes and time of ops under a device's limits, exact on small traces, whole on any."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_trace import any_trace
from parametrized import parametrized
from stepscope.analysis.costs.roofline import BOUNDS, RooflineSummary, roofline, roofline_summary
from stepscope.analysis.structure.links import Linked, link
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, TraceBuilder, needs_traces

H200 = "NVIDIA H200"
BF16_PEAK, FP32_PEAK, TF32_PEAK, BANDWIDTH = 989.4e12, 66.9e12, 494.7e12, 4.8e12


def product(
    trace: TraceBuilder, ts: float, size: int, runs: float, dtype: str = "c10::BFloat16", kernel: str = "gemm"
):
    """An `aten::mm` of square matrices whose kernel runs so many microseconds."""
    args = {"Input Dims": [[size, size], [size, size]], "Input type": [dtype, dtype]}
    return trace.op("aten::mm", ts, 1, **args).launch(kernel, ts + 0.2, runs=(ts + 2, runs), took=0.1)


def rows(trace: TraceBuilder, device: str | None = H200) -> list[dict[str, Any]]:
    return roofline(trace.linked(), device).to_dicts()


def only(trace: TraceBuilder, device: str | None = H200) -> dict[str, Any]:
    (row,) = rows(trace, device)
    return row


def test_a_product_is_placed_by_its_flops_and_its_bytes():
    # GIVEN two products of 1024³ in 4 µs each
    trace = product(TraceBuilder(), 0, 1024, 4)
    product(trace, 10, 1024, 4)

    row = only(trace)

    flops, num_bytes = 2 * 2 * 1024**3, 2 * 3 * 1024**2 * 2
    assert (row["op"], row["shapes"], row["dtype"]) == ("aten::mm", "[[1024, 1024], [1024, 1024]]", "bfloat16")
    assert (row["kernel"], row["num_calls"], row["num_kernels"], row["total_ns"]) == ("gemm", 2, 2, 8000)
    assert (row["flops"], row["bytes"], row["intensity"]) == (flops, num_bytes, flops / num_bytes)
    assert row["flops_per_s"] == pytest.approx(flops / 8e-6) and row["bytes_per_s"] == pytest.approx(num_bytes / 8e-6)
    assert row["compute_share"] == pytest.approx(flops / 8e-6 / BF16_PEAK)
    assert row["memory_share"] == pytest.approx(num_bytes / 8e-6 / BANDWIDTH)
    assert (row["bound"], row["limit_share"], row["time_share"]) == ("compute", row["compute_share"], 1.0)


def test_an_op_costs_once_whatever_it_launches():
    # GIVEN a product in three parts: a fill, split-K and its reduction
    trace = product(TraceBuilder(), 0, 1024, 4, kernel="splitK_gemm")
    trace.memset(1, 1, correlation=1001).kernel("splitKreduce", 8, 1, correlation=1001)

    row = only(trace)

    assert (row["flops"], row["num_calls"], row["num_kernels"], row["total_ns"]) == (2 * 1024**3, 1, 3, 6000)
    assert row["kernel"] == "splitK_gemm"  # the longest


@pytest.mark.parametrize(
    ("runs", "bound"),
    [(0.003, "memory"), (0.009, "memory"), (0.02, "neither"), (2, "neither")],
)
def test_an_elementwise_op_is_bound_by_memory_or_by_neither(runs, bound):
    # GIVEN an op that reads and writes 8 KiB each: 3.4 ns at the bandwidth
    args = {"Input Dims": [[2048]], "Input type": ["float"]}
    trace = TraceBuilder().op("aten::relu", 0, 1, **args).launch("k", 0.2, runs=(2, runs))

    row = only(trace)

    assert (row["flops"], row["bytes"], row["compute_share"]) == (0, 16384, 0.0)
    assert (row["bound"], row["peak_dtype"]) == (bound, None)


@pytest.mark.parametrize(
    ("dtype", "kernel", "runs", "peak_dtype", "peak"),
    [
        ("c10::BFloat16", "gemm", 100, "bf16", BF16_PEAK),
        ("float", "ampere_sgemm_128x64", 100, "fp32", FP32_PEAK),
        ("float", "cutlass_80_tensorop_s1688gemm_128x64", 100, "tf32", TF32_PEAK),
        ("float", "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", 100, "tf32", TF32_PEAK),
        # Faster than float32 can be: it was not float32.
        ("float", "gemm", 10, "tf32", TF32_PEAK),
    ],
)
def test_the_peak_is_that_of_the_arithmetic_that_ran(dtype, kernel, runs, peak_dtype, peak):
    row = only(product(TraceBuilder(), 0, 1024, runs, dtype, kernel))

    assert row["peak_dtype"] == peak_dtype
    assert row["compute_share"] == pytest.approx(2 * 1024**3 / (runs * 1e-6) / peak)


def test_a_device_that_nobody_knows_leaves_rates_and_no_shares():
    for device in (None, "NVIDIA H2000"):
        row = only(product(TraceBuilder(), 0, 1024, 4), device)

        assert row["flops_per_s"] == pytest.approx(2 * 1024**3 / 4e-6)
        assert (row["compute_share"], row["memory_share"], row["limit_share"], row["bound"]) == (None,) * 4


def test_kernels_of_one_op_are_placed_apart_when_they_differ():
    # GIVEN the same copy once in order and once transposed
    sizes = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    trace = TraceBuilder().op("aten::copy_", 0, 1, **sizes).launch("straight", 0.2, runs=(2, 1))
    trace.op("aten::copy_", 10, 1, **sizes).launch("transposed", 10.2, runs=(12, 8))

    assert [(row["kernel"], row["bytes"], row["total_ns"]) for row in rows(trace)] == [
        ("transposed", 32768, 8000),
        ("straight", 32768, 1000),
    ]


def test_what_has_other_limits_is_left_out():
    trace = product(TraceBuilder(), 0, 1024, 4).kernel("ncclDevKernel_AllReduce", 20, 50, stream=9)
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 80, 5, category="gpu_memcpy", bytes=100)
    trace.kernel("Memcpy DtoD (Device -> Device)", 90, 5, category="gpu_memcpy", bytes=100)

    assert [(row["kernel"], row["total_ns"], row["num_calls"]) for row in rows(trace)] == [
        ("Memcpy DtoD (Device -> Device)", 5000, 0),
        ("gemm", 4000, 1),
    ]


def test_lists_concatenations_and_compiled_kernels_have_bytes_too():
    adam = "void multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4, 0, false>>"
    lists = [[[10], [20]]] * 4 + [[], [[], []]] + [[]] * 8
    trace = TraceBuilder().op(
        "aten::_fused_adamw_", 0, 1, **{"Input Dims": lists, "Concrete Inputs": [""] * 11 + ["False"] * 3}
    )
    trace.launch(adam, 0.2, runs=(2, 9))
    trace.op("aten::cat", 10, 1, **{"Input Dims": [[[8], [4]], []], "Input type": ["TensorList", "Scalar"]})
    trace.launch("CatArrayBatchedCopy<float, 1>", 10.2, runs=(12, 5))
    fused = "triton_poi_fused_add_mul_3"
    trace.op(fused, 20, 1, **{"Input Dims": [[16], [16]], "Input type": ["float", "float"]})
    trace.launch(fused, 20.2, runs=(22, 1))
    lookup = "triton_poi_fused_embedding_0"
    trace.op(lookup, 30, 1, **{"Input Dims": [[1 << 20], [16]], "Input type": ["float", "float"]})
    trace.launch(lookup, 30.2, runs=(32, 0.5))

    table = roofline(trace.linked(), H200)

    # Parameters, two moments and gradients read with two steps of 4 bytes, all but the gradients written
    assert table["bytes"].to_list() == [30 * 4 * 7 + 8, 2 * 12 * 4, 128, None]
    assert table["flops"].to_list() == [0, 0, 0, 0]
    assert roofline_summary(table).known_ns == 15_000


def test_the_summary_tells_how_much_is_known_and_what_limits_it():
    trace = product(TraceBuilder(), 0, 1024, 4)  # half of the peak
    args = {"Input Dims": [[2048]], "Input type": ["float"]}
    trace.op("aten::relu", 10, 1, **args).launch("k", 10.2, runs=(12, 2))
    trace.op("my::op", 20, 1).launch("k", 20.2, runs=(22, 3)).kernel("alone", 40, 1)

    summary = roofline_summary(roofline(trace.linked(), H200))

    at_limit = 2 * 1024**3 / BF16_PEAK * 1e9 + 16384 / BANDWIDTH * 1e9
    assert summary == RooflineSummary(
        total_ns=10_000,
        known_ns=6_000,
        compute_ns=4_000,
        memory_ns=0,
        neither_ns=2_000,
        unknown_ns=4_000,
        known_share=0.6,
        limit_share=pytest.approx(at_limit / 6000),
    )
    assert summary.to_json()["total_ns"] == 10_000


def test_a_trace_without_gpu_work_has_an_empty_roofline():
    table = roofline(TraceBuilder().op("aten::mm", 0, 1).linked(), H200)

    assert table.is_empty() and roofline_summary(table) == RooflineSummary()


sizes = st.recursive(st.none() | st.integers(-3, 2**70), lambda part: st.lists(part), max_leaves=8)


@given(any_trace(), st.lists(st.tuples(sizes, sizes), max_size=3), st.sampled_from([H200, None]))
def test_all_device_time_is_there_whatever_the_trace(builder, operands, device):
    for number, (shapes, strides) in enumerate(operands):
        texts = {"Input Dims": shapes, "Input Strides": strides, "Input type": ["float", "float"]}
        builder.op(["aten::mm", "aten::copy_", "aten::cat"][number], number, 0.5, **texts)
        builder.launch("CatArrayBatchedCopy<float, 3>", number + 0.1, runs=(number, 1), took=0.1)
    linked = builder.linked()

    table = roofline(linked, device)
    summary = roofline_summary(table)

    work = device_work(linked)
    assert table["total_ns"].sum() == summary.total_ns == work["duration_ns"].sum()
    assert table["num_kernels"].sum() == work.height
    parts = (summary.compute_ns, summary.memory_ns, summary.neither_ns, summary.unknown_ns)
    assert sum(parts) == summary.total_ns and set(table["bound"].drop_nulls()) <= BOUNDS.keys()
    assert roofline(linked, device).equals(table)


def device_work(linked: Linked) -> pl.DataFrame:
    return linked.device.filter(pl.col("activity") != "communication", pl.col("kind") != "memcpy")


@needs_traces
@parametrized(
    ("name", "known_share"),
    [
        ("contiguous_copies", 1.0),
        ("fp32_no_tf32", 0.994),
        ("gpt2_eager", 0.981),
        ("llama_compiled", 0.964),
        ("mask_blocks_flash", 1.0),
        ("recompiles", 0.974),
    ],
    quick=3,
)
def test_no_op_of_a_real_trace_is_faster_than_its_device(name, known_share):
    linked = link(read_trace(TRACES / f"h200/{name}.json.gz", workers=1))
    table = roofline(linked, linked.trace.facts.devices[0])

    assert round(roofline_summary(table).known_share, 3) == known_share
    assert table["compute_share"].max() <= 1.0
    # Tensors of less than the 50 MB of the H200's second cache may still be there.
    each = pl.col("bytes") / pl.col("num_calls")
    assert table.filter(pl.col("memory_share") > 1.0, each > 50e6).is_empty()
    assert table.filter(pl.col("memory_share") > 1.06).is_empty()


@needs_traces
def test_a_vocabulary_that_is_no_multiple_of_eight_keeps_a_product_far_from_its_limit():
    linked = link(read_trace(TRACES / "h200/gpt2_eager.json.gz", workers=1))
    table = roofline(linked, linked.trace.facts.devices[0])

    head = table.head(3)
    assert head["op"].to_list() == ["aten::mm"] * 3 and head["shapes"].cast(pl.String).str.contains("50257").all()
    assert head["bound"].to_list() == ["neither"] * 3
    assert [round(share, 3) for share in head["compute_share"]] == [0.096, 0.141, 0.149]
    assert head["flops"].to_list() == [2 * 2 * 8192 * 768 * 50257] * 3
