"""A scatter far below the bandwidth is found with the lookup it is the backward of; a fast one is not."""

from __future__ import annotations

import pytest
from device_cases import FP32, INT64, Program, without_shapes

from stepscope.findings.finding import CannotCheck
from stepscope.findings.rules import serialised_scatter

TABLE, VALUES = [256, 512], [500_000, 512]
MOVED_NS = 3 * 4 * 500_000 * 512 / (4.8e12 * 0.85) * 1e9
KERNELS = ["DeviceRadixSort", "void at::native::indexing_backward_kernel_stride_1<float, 4>(long const*)"]


def lookup_and_backward(program: Program, took: float, op: str = "aten::_index_put_impl_") -> None:
    number = program.op("aten::index", [TABLE, []], 400)
    shapes = [TABLE, [], VALUES, [], []] if "put" in op else [VALUES, [500_000], [], [], []]
    types = [FP32, "TensorList", FP32, "", ""] if "put" in op else [FP32, INT64, "", "", ""]
    program.op(op, shapes, took, types, backward=number, kernels=KERNELS)


def test_the_backward_of_advanced_indexing():
    program = Program()
    lookup_and_backward(program, 10_000)

    (finding,) = serialised_scatter.check(program.case())

    assert finding.saving_ns == pytest.approx(20_000_000 - MOVED_NS, abs=1)
    assert "for what aten::index looked up" in finding.sentence
    assert "976.6 MiB" in finding.sentence
    assert "index_select" in finding.fix and finding.upper_bound


def test_an_embedding():
    program = Program()
    lookup_and_backward(program, 10_000, "aten::embedding_dense_backward")

    (finding,) = serialised_scatter.check(program.case())
    assert "one_hot" in finding.fix


def test_at_the_bandwidth_it_is_clean():
    program = Program()
    lookup_and_backward(program, 1000)  # 2 ms for what needs 0.75 ms

    assert serialised_scatter.check(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(CannotCheck, match="record_shapes=True"):
        serialised_scatter.check(without_shapes())
