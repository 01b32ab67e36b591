"""Weights cast in every micro-batch are found; one micro-batch and other weights in each are not."""

from __future__ import annotations

import pytest
from device_cases import BF16, FP32, Program, without_shapes

from stepscope.errors import Unavailable
from stepscope.findings.rules.casts_and_copies import autocast_cost, repeated_weight_casts

DOWN = [BF16, FP32, "Scalar"]


def micro_batch(program: Program, width: int = 4096, took: float = 40) -> None:
    w = [width, width]
    linear = [("aten::linear", [[512, width], w, []], [FP32, FP32, ""])]
    number = 0
    for _ in range(3):
        number = program.op("aten::copy_", [w, w, []], took, DOWN, around=linear)
        program.op("aten::mm", [[512, width], w], 60, BF16, around=linear)
    program.op("aten::mm", [w, [512, width]], 60, BF16, backward=number)


def test_weights_cast_in_every_micro_batch():
    program = Program()
    for _ in range(4):
        micro_batch(program)

    case = program.case()
    (finding,) = repeated_weight_casts(case)

    assert finding.saving_ns == pytest.approx(9 * 40_000)
    assert "3 weights are cast to bfloat16 in each of 4 micro-batches per step." in finding.sentence
    assert "Repeating 9 casts takes" in finding.sentence
    assert autocast_cost(case) == [], "what is cast once pays: 0.12 ms for products that take four times as long"


def test_one_micro_batch_is_clean():
    program = Program()
    micro_batch(program)

    assert repeated_weight_casts(program.case()) == []


def test_other_weights_in_each_are_clean():
    program = Program()
    for width in (2048, 3072, 4096):
        micro_batch(program, width)

    assert repeated_weight_casts(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        repeated_weight_casts(without_shapes())
