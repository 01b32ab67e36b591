"""Depthwise convolutions have no product: nothing for tensor cores, and no gain from channels last by itself."""

from __future__ import annotations

import pytest
from device_cases import BF16, FP32, Program

from stepscope.analysis.costs.op_costs import is_depthwise
from stepscope.devices import find_device
from stepscope.findings.diagnose import diagnose
from stepscope.findings.rules.layout import memory_layout
from stepscope.findings.rules.matrix_products import fp32_matmul, misaligned_gemm
from stepscope.session.case import Case

IMAGES, PLANAR = [256, 3, 246, 246], [3 * 246 * 246, 246 * 246, 246, 1]
FILTERS = [3, 1, 23, 23]
FLOPS = 2 * 256 * 3 * 224 * 224 * 23 * 23


def convolution(
    images: list[int], weight: list[int], groups: int, dtype: str, took_us: float, kernel: str = "conv_kernel"
) -> Case:
    program = Program()
    arguments = ["", "", "", "[0, 0]", "[1, 1]", "[1, 1]", "False", "[0, 0]", str(groups)]
    steps = [images[1] * images[2] * images[3], images[2] * images[3], images[3], 1]
    program.op(
        "aten::convolution", [images, weight, *[[]] * 7], took_us, [dtype, dtype, *["ScalarList"] * 6, "Scalar"],
        inputs=[*arguments[:3], "[1, 1]", *arguments[3:4], "[1, 1]", *arguments[6:]],
        strides=[steps, [weight[1] * weight[2] * weight[3], weight[2] * weight[3], weight[3], 1], *[[]] * 7],
        kernels=[kernel],
    )  # fmt: skip
    return program.case()


def blurred(dtype: str = FP32) -> Case:
    return convolution(IMAGES, FILTERS, 3, dtype, 6700, "conv_depthwise2d_forward_kernel_generic")


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_tensor_cores_do_not_help_them(dtype):
    case = blurred(dtype)

    assert fp32_matmul(case) == [] and misaligned_gemm(case) == []
    assert case.work["peak_dtype"].drop_nulls().unique().to_list() == ["fp32"], "also in 16 bits"


def test_their_limit_is_that_of_the_other_cores():
    events = blurred().ledger.events.filter(row="slow_products")

    at_peak_ns = FLOPS / find_device("NVIDIA H200").peak_flops["fp32"] * 1e9
    assert events["least_ns"].sum() == pytest.approx(at_peak_ns, rel=0.001)


def test_a_wide_filter_is_named_with_what_two_narrow_ones_take():
    found = [one for one in diagnose(blurred()).findings if one.id == "unclaimed_time"]
    (finding,) = (one for one in found if "Most of it is aten::convolution" in one.sentence)

    assert "529 multiply-adds per pixel" in finding.sentence and "these take 46." in finding.sentence
    assert "groups=channels" in finding.fix


def test_channels_last_is_not_promised_to_help_them():
    assert memory_layout(blurred()) == []


@pytest.mark.parametrize(("dtype", "is_slow"), [(BF16, True), (FP32, False)])
def test_channels_last_is_for_tensor_cores(dtype, is_slow):
    case = convolution([256, 64, 56, 56], [64, 64, 3, 3], 1, dtype, 10_000)

    found = memory_layout(case)

    assert bool(found) == is_slow
    if is_slow:
        assert " 0 ms" not in found[0].sentence and "changing the layout" not in found[0].sentence
        assert "convolutions at 6 TFLOP/s take 10.0 ms" in found[0].sentence


@pytest.mark.parametrize(
    ("op", "shapes", "inputs", "expected"),
    [
        ("aten::_conv_depthwise2d", [[8, 64, 9, 9], [64, 1, 3, 3]], None, True),
        ("aten::cudnn_convolution", [[8, 64, 9, 9], [128, 1, 3, 3]], None, True),
        ("aten::cudnn_convolution", [[8, 1, 9, 9], [64, 1, 3, 3]], None, False),  # gray images: a product
        ("aten::cudnn_convolution", [[8, 64, 9, 9], [64, 2, 3, 3]], None, False),
        ("aten::conv_transpose2d", [[8, 64, 9, 9], [64, 1, 3, 3], [], [], [], [], []],
         ["", "", "", "[1, 1]", "[0, 0]", "[0, 0]", "1"], False),  # to one channel: a product
        ("aten::conv_transpose2d", [[8, 64, 9, 9], [64, 1, 3, 3], [], [], [], [], []],
         ["", "", "", "[1, 1]", "[0, 0]", "[0, 0]", "64"], True),
        ("aten::convolution_backward", [[8, 64, 9, 9], [8, 64, 9, 9], [64, 1, 3, 3]], None, True),
        ("aten::mm", [[8, 64], [64, 1]], None, False),
    ],
)  # fmt: skip
def test_what_is_depthwise(op, shapes, inputs, expected):
    texts = [str(shapes), None, None if inputs is None else str(inputs).replace("'", '"')]

    assert is_depthwise(op, *texts) is expected
