"""Small products in a loop are found where they cannot need one another; layers that do are not."""

from __future__ import annotations

import pytest
from device_cases import BF16, Program, without_shapes

from stepscope.errors import Unavailable
from stepscope.findings.rules.matrix_products import small_gemms

WIDTH, INNER = 1024, 4096


def experts(program: Program, rows: list[int]) -> None:
    for num in rows:
        program.op("aten::mm", [[num, WIDTH], [WIDTH, INNER]], 30, BF16)
        program.op("aten::gelu", [[num, INNER]], 5, BF16)
        program.op("aten::mm", [[num, INNER], [INNER, WIDTH]], 30, BF16)


def heads(program: Program, num: int, rows: int = 256, size: int = 64, took: float = 30) -> None:
    for _ in range(num):
        program.op("aten::mm", [[rows, 2048], [2048, size]], took, BF16)


def test_a_loop_over_experts():
    rows = [100, 120, 90, 130, 80, 110] * 2
    program = Program()
    experts(program, rows)

    (finding,) = small_gemms(program.case())

    # 24 products: their bytes, each read and written once, take longer than their arithmetic.
    moved = sum(2 * 2 * (num * WIDTH + WIDTH * INNER + num * INNER) for num in rows)
    assert finding.saving_ns == pytest.approx(24 * 30_000 - moved / (4.8e12 * 0.85) * 1e9, rel=1e-6)
    assert "24 matrix products per step run one after the other in 1 loop" in finding.sentence
    assert "_grouped_mm" in finding.fix


def test_one_product_for_each_head():
    program = Program()
    heads(program, 16)

    (finding,) = small_gemms(program.case())

    assert "each with tiles for 2 % of the GPU's 132 SMs" in finding.sentence
    assert "torch.bmm" in finding.fix


def test_layers_of_one_shape_may_need_one_another():
    program = Program()
    for _ in range(16):
        program.op("aten::mm", [[100, WIDTH], [WIDTH, WIDTH]], 30, BF16)

    assert small_gemms(program.case()) == []


def test_a_layer_up_and_a_layer_down_may_need_one_another():
    program = Program()
    experts(program, [100] * 12)

    assert small_gemms(program.case()) == []


def test_a_recurrence_is_no_loop():
    """An LSTM's cell: sequences end one after the other, and gates are computed between."""
    program = Program()
    for num in range(120, 100, -1):
        program.op("aten::mm", [[num, WIDTH], [WIDTH, INNER]], 30, BF16)
        program.op("aten::sigmoid", [[num, INNER]], 5, BF16)
    for _ in range(20):
        program.op("aten::mm", [[100, WIDTH], [WIDTH, INNER]], 30, BF16)
        program.op("aten::sigmoid", [[100, INNER]], 5, BF16)

    assert small_gemms(program.case()) == []


def test_products_that_fill_the_device_are_clean():
    program = Program()
    heads(program, 16, rows=16384, size=256, took=300)

    assert small_gemms(program.case()) == []


def test_experts_that_fill_the_device_on_a_host_that_is_late():
    """Twelve turns of three launches, 100 µs of the host each: one is left, and its kernels take as long as all."""
    program = Program(pace=100)
    experts(program, [1000, 1200, 900, 1300, 800, 1100] * 2)

    (finding,) = small_gemms(program.case())

    assert finding.saving_ns == pytest.approx(36 * 100_000 - 12 * 65_000, rel=0.05)
    assert "36 of 36 launches per step" in finding.sentence


def test_without_a_late_host_products_that_fill_the_device_are_clean():
    program = Program()
    experts(program, [1000, 1200, 900, 1300, 800, 1100] * 2)

    assert small_gemms(program.case()) == []


def test_micro_batches_of_other_lengths_are_no_loop():
    """Four layers of two products for each: those of one micro-batch need one another."""
    program = Program(pace=100)
    for rows in (100, 120, 90, 130):
        for _ in range(4):
            program.op("aten::mm", [[rows, WIDTH], [WIDTH, INNER]], 30, BF16)
            number = program.op("aten::mm", [[rows, INNER], [INNER, WIDTH]], 30, BF16)
        program.op("aten::mm", [[INNER, rows], [rows, WIDTH]], 30, BF16, backward=number)

    assert small_gemms(program.case()) == []


def test_the_tile_is_in_the_kernel_s_name():
    program = Program()
    for _ in range(16):
        program.op(
            "aten::mm", [[256, 2048], [2048, 64]], 30, BF16, kernels=["nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"]
        )

    (finding,) = small_gemms(program.case())
    assert "each with tiles for 24 % of" in finding.sentence, "32 tiles of 64 × 8, or of 8 × 64"


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        small_gemms(without_shapes())
