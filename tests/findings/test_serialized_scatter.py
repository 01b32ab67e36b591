"""A scatter far below the bandwidth is found with the lookup it is the backward of; a fast one is not."""

from __future__ import annotations

import pytest
from device_cases import FP32, INT64, Program, without_shapes

from stepscope.errors import Unavailable
from stepscope.findings.rules.experts_and_scatters import serialized_scatter

TABLE, VALUES = [256, 512], [500_000, 512]
GOOD_NS = 4 * (500_000 + 2 * 256) * 512 / (4.8e12 * 0.4) * 1e9 + 500_000 * 0.2
"""The values once, the table read and written, at 40 % of 4.8 TB/s, and the indices sorted: 0.63 ms."""
KERNELS = ["DeviceRadixSort", "void at::native::indexing_backward_kernel_stride_1<float, 4>(long const*)"]


def lookup_and_backward(program: Program, took: float, op: str = "aten::_index_put_impl_") -> None:
    number = program.op("aten::index", [TABLE, []], 400)
    shapes = [TABLE, [], VALUES, [], []] if "put" in op else [VALUES, [500_000], [], [], []]
    types = [FP32, "TensorList", FP32, "", ""] if "put" in op else [FP32, INT64, "", "", ""]
    program.op(op, shapes, took, types, backward=number, kernels=KERNELS)


def test_the_backward_of_advanced_indexing():
    program = Program()
    lookup_and_backward(program, 10_000)

    (finding,) = serialized_scatter(program.case())

    assert finding.saving_ns == pytest.approx(20_000_000 - GOOD_NS, abs=1)
    assert "for aten::index" in finding.sentence
    assert "977 MiB" in finding.sentence
    assert finding.fix.startswith("F.embedding(index, x)")


def test_an_embedding():
    program = Program()
    lookup_and_backward(program, 10_000, "aten::embedding_dense_backward")

    (finding,) = serialized_scatter(program.case())
    assert "one_hot" in finding.fix


def test_as_fast_as_an_embedding_s_backward_it_is_clean():
    program = Program()
    lookup_and_backward(program, 600)  # 1.2 ms for what takes 0.63 ms

    assert serialized_scatter(program.case()) == []


def test_a_table_as_large_as_the_values_is_read_and_written_too():
    program = Program()
    number = program.op("aten::index", [VALUES, []], 400)
    shapes, types = [VALUES, [], VALUES, [], []], [FP32, "TensorList", FP32, "", ""]
    program.op("aten::_index_put_impl_", shapes, 1600, types, backward=number, kernels=KERNELS)  # needs 1.7 ms

    assert serialized_scatter(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        serialized_scatter(without_shapes())


@pytest.mark.parametrize(("num_rows", "num_found"), [(3, 1), (5000, 0)])
def test_an_embedding_of_a_few_rows_is_one_pass(num_rows, num_found):
    """1 ms for 977 MiB is good for a sort and a scatter, and three times what a one-hot product needs."""
    program = Program()
    table, types = [num_rows, 512], [FP32, "Scalar", INT64, "Scalar", FP32]
    number = program.op("aten::gather", [table, [], VALUES, [], VALUES], 400, types)
    shapes, types = [VALUES, [500_000], [], [], []], [FP32, INT64, "", "", ""]
    program.op("aten::embedding_dense_backward", shapes, 500, types, backward=number, kernels=KERNELS)

    found = serialized_scatter(program.case())

    pass_ns = 4 * 500_000 * 512 / (4.8e12 * 0.85) * 1e9
    assert len(found) == num_found
    assert all(one.saving_ns == pytest.approx(1_000_000 - pass_ns, rel=0.01) for one in found)
