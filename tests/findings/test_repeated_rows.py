"""Products of rows that an expanded tensor repeats are found; what only reads such a tensor is not."""

from __future__ import annotations

from typing import Any

import pytest
from device_cases import BF16, FP32, Program

from parametrized import parametrized
from stepscope.findings.rules.repeated_work import repeated_rows

TOKENS, ROWS = [96, 256, 1024], 96 * 256
EXPANDED, DENSE = [1024, 0, 1], [262144, 1024, 1]
Between = list[tuple[str, list[Any], list[Any]]]
CAST: Between = [("aten::copy_", [TOKENS, TOKENS, []], [DENSE, DENSE, []])]


def conditioned(between: Between, strides: list[int] = EXPANDED, product: list[Any] | None = None) -> Program:
    program = Program()
    for _ in range(4):
        first = program.op("aten::silu", [TOKENS], 70, FP32, strides=[strides])
        for op, shapes, steps in between:
            program.op(op, shapes, 30, BF16, strides=steps)
        name = "aten::bmm" if product and len(product[0]) == 3 else "aten::mm"
        number = program.op(name, product or [[ROWS, 1024], [1024, 6144]], 400, BF16)
        program.op("aten::mm", [[ROWS, 6144], [6144, 1024]], 500, BF16, backward=number)
        program.op("aten::silu_backward", [TOKENS, TOKENS], 90, FP32, backward=first)
    return program


def test_each_row_is_computed_once():
    (finding,) = repeated_rows(conditioned(CAST).case())

    # 70 + 400 + 500 + 90 µs each; no kernel is faster than 3 µs.
    assert finding.saving_ns == pytest.approx(4 * (1_060_000 - 4 * 3_000), rel=0.01)
    assert "4 products" in finding.sentence and "24,576 × 1,024, only 96 rows differ" in finding.sentence
    assert "256 times fewer rows" in finding.fix


@parametrized(
    "program",
    [
        conditioned(CAST, strides=DENSE),
        conditioned([("aten::add", [TOKENS, TOKENS, []], [DENSE, DENSE, []])]),
        conditioned([("aten::native_dropout", [TOKENS, [], []], [DENSE, [], []])]),
        conditioned(CAST, product=[[24, 1024, 1024], [24, 1024, 64]]),
        conditioned(CAST, product=[[ROWS, 512], [512, 6144]]),
        conditioned(CAST, strides=[262144, 1024, 0]),
    ],
    quick=3,
    ids=[
        "nothing is expanded",
        "a sum with tokens",
        "dropout",
        "a product of a batch",
        "other rows",
        "one number per row",
    ],
)
def test_other_rows_are_clean(program):
    assert repeated_rows(program.case()) == []


def test_a_fill_for_the_product_is_no_other_reader():
    program = Program()
    for _ in range(4):
        program.op("aten::silu", [TOKENS], 70, FP32, strides=[EXPANDED])
        shapes = [[6144], [ROWS, 1024], [1024, 6144], [], []]
        program.op("aten::addmm", shapes, 400, BF16, kernels=["Memset (Device)", "nvjet_gemm"])

    assert len(repeated_rows(program.case())) == 1
