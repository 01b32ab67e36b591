"""Polynomials of X·Xᵀ on the longer side of X are found; what only has their shapes is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from device_cases import BF16, Program

from parametrized import parametrized
from stepscope.findings.rules.gram_matrices import longer_side
from stepscope.findings.rules.wide_and_narrow import product_order

LONG, SHORT = 4096, 1024
Between = Sequence[tuple[str, list[list[int]]]]


def iteration(
    rows: int = LONG,
    inner: int = SHORT,
    *,
    between: Between = (),
    num_squares: int = 1,
    applied: list[list[int]] | None = None,
    right: list[int] | None = None,
    num: int = 8,
) -> Program:
    """Iterations: `gram = x @ x.mT`, products of `gram` by itself, other ops on it, and `gram @ x`."""
    program = Program()
    for _ in range(num):
        strides = [[inner, 1], right or [1, inner]]
        program.op("aten::mm", [[rows, inner], [inner, rows]], 50, BF16, strides=strides)
        for _ in range(num_squares):
            sizes = [[rows, rows]] * 3
            program.op("aten::addmm", [*sizes, [], []], 180, BF16)
        for op, shapes in between:
            program.op(op, shapes, 20, BF16)
        program.op("aten::mm", applied or [[rows, rows], [rows, inner]], 50, BF16)
    return program


def test_the_shorter_side_takes_a_fraction():
    case = iteration().case()

    (finding,) = longer_side(case)

    peak = 989.4e12 * 0.6  # no product is faster
    square_ns, other_ns = (2 * SHORT**2 * inner / peak * 1e9 for inner in (SHORT, LONG))
    expected_ns = 2 * (50_000 - other_ns) + 180_000 - square_ns
    assert finding.saving_ns == pytest.approx(8 * expected_ns, rel=0.01)
    assert "8 times per step" in finding.sentence and "one of 4,096 × 1,024 makes 4,096 × 4,096" in finding.sentence
    assert finding.fix.startswith("x = x.mT if x.size(-2) > x.size(-1) else x")
    assert product_order(case) == []


def test_a_wide_matrix_from_the_other_side():
    program = iteration(applied=[[SHORT, LONG], [LONG, LONG]], right=[SHORT, 1])
    assert longer_side(program.case()) == [], "these strides are of two matrices"

    program = iteration(applied=[[SHORT, LONG], [LONG, LONG]])
    (finding,) = longer_side(program.case())

    assert "one of 1,024 × 4,096 makes 4,096 × 4,096" in finding.sentence
    assert "x.size(-2) < x.size(-1)" in finding.fix


def test_sums_and_multiples_in_between_become_smaller_too():
    square = [LONG, LONG]
    linear = [("aten::mul", [square, []]), ("aten::add", [square, square, []])]

    (finding,) = longer_side(iteration(between=linear).case())

    (plain,) = longer_side(iteration().case())
    assert finding.saving_ns == pytest.approx(plain.saving_ns + 8 * 2 * (20_000 - 3_000), rel=0.01)


@parametrized(
    "program",
    [
        iteration(rows=SHORT, inner=LONG),
        iteration(rows=SHORT, inner=SHORT),
        iteration(num_squares=0, between=[("aten::_softmax", [[LONG, LONG], [], []])]),
        iteration(between=[("aten::mul", [[LONG, LONG], [LONG, LONG]])]),
        iteration(between=[("aten::_softmax", [[LONG, LONG], [], []])]),
        iteration(applied=[[LONG, LONG], [LONG, 512]]),
    ],
    quick=3,
    ids=["the shorter side", "no side is longer", "attention", "a mask", "a softmax", "another matrix"],
)
def test_what_only_looks_alike_is_clean(program):
    assert longer_side(program.case()) == []
