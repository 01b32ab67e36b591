"""Casts that cost more than tensor cores give are found; those that pay, and those somebody wrote, are not."""

from __future__ import annotations

import pytest
from device_cases import BF16, FP32, Program, without_shapes

from stepscope.errors import Unavailable
from stepscope.findings.rules.casts_and_copies import autocast_cost
from stepscope.findings.rules.launches import launch_bound

ROWS, WIDTH = 1 << 20, 64
DOWN, UP = [BF16, FP32, "Scalar"], [FP32, BF16, "Scalar"]


def layer(program: Program, rows: int = ROWS, width: int = WIDTH, cast: float = 150, product: float = 150) -> None:
    """A linear layer under autocast: its input and its weight are cast, then multiplied."""
    x, w = [rows, width], [width, width]
    linear = [("aten::linear", [x, w, []], [FP32, FP32, ""])]
    program.op("aten::copy_", [x, x, []], cast, DOWN, around=linear)
    program.op("aten::copy_", [w, w, []], 2, DOWN, around=linear)
    program.op("aten::mm", [x, w], product, BF16, around=linear)


def test_casts_that_cost_more_than_they_give():
    program = Program()
    for _ in range(4):
        layer(program)

    (finding,) = autocast_cost(program.case())

    # In TF32 a product moves twice the bytes: 132 µs at 85 % of 4.8 TB/s, less than the 150 µs that it takes now.
    assert finding.saving_ns == pytest.approx(4 * 152_000)
    assert "8 casts per step take 608 µs" in finding.sentence
    assert "saves only 0 ms" in finding.sentence


def test_products_that_gain_more_are_clean():
    program = Program()
    for _ in range(4):
        layer(program, rows=8192, width=4096, cast=50, product=450)

    assert autocast_cost(program.case()) == []


def test_a_late_host_is_another_rule():
    """Without casts the host would be done sooner; but the GPU gains by them, and something else must be changed."""
    program = Program(pace=900)
    for _ in range(4):
        layer(program, rows=8192, width=4096, cast=50, product=450)

    case = program.case()
    assert autocast_cost(case) == [] and launch_bound(case)


def test_casts_by_hand_are_no_autocast():
    program = Program()
    x = [ROWS, WIDTH]
    for _ in range(4):
        program.op("aten::copy_", [x, x, []], 150, DOWN, around=[("aten::to", [x, []], [FP32, ""])])
        program.op("aten::mm", [x, [WIDTH, WIDTH]], 150, BF16)

    assert autocast_cost(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        autocast_cost(without_shapes())
