"""Attention in products and a softmax is found, forward and backward; other softmaxes and fused attention are not."""

from __future__ import annotations

import pytest
from device_cases import BF16, BOOL, Program, without_shapes

from stepscope.errors import Unavailable
from stepscope.findings.rules.attention import handwritten_attention
from stepscope.findings.rules.fusion import unfused_elementwise
from stepscope.findings.rules.memory import full_logits

HEADS, LENGTH, SIZE = 64, 2048, 128
SCORES = [4, 16, LENGTH, LENGTH]
LEFT, RIGHT = [HEADS, LENGTH, SIZE], [HEADS, SIZE, LENGTH]
SQUARE = [HEADS, LENGTH, LENGTH]
PRODUCT_FLOPS = 2 * HEADS * LENGTH * LENGTH * SIZE
FLASH = 989.4e12 * 0.35 * LENGTH / (LENGTH + 512)
"""FLOP/s that flash attention reaches over so many keys."""


def forward(program: Program, mask: bool = True, softmax: str = "aten::_softmax") -> None:
    program.op("aten::bmm", [LEFT, RIGHT], 700, BF16)
    program.op("aten::div", [SCORES, []], 300, BF16)
    if mask:
        program.op("aten::masked_fill", [SCORES, [LENGTH, LENGTH], []], 300, [BF16, BOOL, "Scalar"])
    program.op(softmax, [SCORES, [], []], 300, BF16, inputs=["", "-1", "False"])
    program.op("aten::bmm", [SQUARE, LEFT], 700, BF16)


def test_products_and_softmax_become_flash_attention():
    program = Program()
    forward(program)

    (finding,) = handwritten_attention(program.case())

    # Two products over half of the scores, as under a causal mask.
    flash_ns = 2 * PRODUCT_FLOPS / 2 / FLASH * 1e9
    assert finding.saving_ns == pytest.approx(2_300_000 - flash_ns, rel=1e-6)
    assert "1 softmax call per step over 2,048 × 2,048 scores, with 5 kernels" in finding.sentence
    assert "is_causal=True" in finding.fix and finding.upper_bound


def test_without_a_mask_all_scores_are_computed():
    program = Program()
    forward(program, mask=False)

    (finding,) = handwritten_attention(program.case())

    assert finding.saving_ns == pytest.approx(2_000_000 - 2 * PRODUCT_FLOPS / FLASH * 1e9, rel=1e-6)
    assert "is_causal" not in finding.fix and not finding.upper_bound


def test_the_backward_belongs_to_it():
    program = Program()
    softmax = program.op("aten::mul", [[8], []], 1)
    forward(program, mask=False)
    program.op("aten::bmm", [LEFT, RIGHT], 700, BF16, backward=softmax)
    program.op("aten::_softmax_backward_data", [SCORES, SCORES, [], []], 500, BF16, backward=softmax)
    program.op("aten::bmm", [SQUARE, LEFT], 700, BF16, backward=softmax)
    program.op("aten::bmm", [[HEADS, SIZE, LENGTH], SQUARE], 700, BF16, backward=softmax)

    (finding,) = handwritten_attention(program.case())

    # Flash's backward has five products where four are seen here but one: three, each a quarter more.
    flash_ns = (2 + 3 * 5 / 4) * PRODUCT_FLOPS / FLASH * 1e9
    assert finding.saving_ns == pytest.approx(2_000_000 + 2_600_000 - flash_ns, rel=1e-6)


def test_copies_into_the_layout_of_its_products_belong_to_it():
    """Before another product, the copy lays out something else; one that casts is needed for its dtype."""
    program = Program()
    heads = [4, 16, LENGTH, SIZE]
    program.op("aten::copy_", [heads, heads, []], 400, BF16)
    program.op("aten::mm", [[8192, 2048], [2048, 2048]], 500, BF16)
    program.op("aten::copy_", [heads, heads, []], 40, BF16)
    program.op("aten::copy_", [heads, heads, []], 400, [BF16, "float", "Scalar"])
    program.op("aten::copy_", [[4, LENGTH, 2048], [4, LENGTH, 2048], []], 400, BF16)
    forward(program)
    program.op("aten::copy_", [[4, LENGTH, 16, SIZE], [4, LENGTH, 16, SIZE], []], 60, BF16)

    (finding,) = handwritten_attention(program.case())

    flash_ns = 2 * PRODUCT_FLOPS / 2 / FLASH * 1e9
    assert finding.saving_ns == pytest.approx(2_300_000 + 100_000 - flash_ns, rel=1e-6)
    assert "with 7 kernels" in finding.sentence


def test_a_softmax_by_hand_counts_too():
    program = Program()
    forward(program, softmax="aten::exp")

    (finding,) = handwritten_attention(program.case())
    assert finding.saving_ns is not None


def test_bytes_of_the_scores_at_the_peak():
    program = Program()
    size = 2 * HEADS * LENGTH * LENGTH
    program.memory(1 << 20, 1 << 40, 1 << 20)
    program.op("aten::bmm", [LEFT, RIGHT], 700, BF16)
    program.memory(size, 2 << 40, (1 << 20) + size)
    program.op("aten::_softmax", [SCORES, [], []], 300, BF16)
    program.memory(size, 3 << 40, (1 << 20) + 2 * size)
    program.op("aten::bmm", [SQUARE, LEFT], 700, BF16)
    program.memory(-size, 2 << 40, (1 << 20) + size)

    (finding,) = handwritten_attention(program.case())

    assert finding.saving_bytes == 2 * size
    assert "1.00 GiB of the memory peak" in finding.sentence


def test_chains_over_scores_are_told_once():
    program = Program()
    forward(program)
    forward(program)

    case = program.case()
    assert handwritten_attention(case)
    assert unfused_elementwise(case) == [] and full_logits(case) == []


def test_a_softmax_that_no_product_takes_is_none():
    """A router's, a classifier's: nothing is multiplied by it."""
    program = Program()
    program.op("aten::bmm", [LEFT, RIGHT], 700, BF16)
    program.op("aten::_softmax", [SCORES, [], []], 300, BF16)

    assert handwritten_attention(program.case()) == []


def test_the_math_back_end_is_another_rule():
    program = Program()
    shape = [4, 16, LENGTH, SIZE]
    sdpa = [("aten::scaled_dot_product_attention", [shape] * 3, [BF16] * 3)]
    program.op("aten::bmm", [LEFT, RIGHT], 700, BF16, around=sdpa)
    program.op("aten::_softmax", [SCORES, [], []], 300, BF16, around=sdpa)
    program.op("aten::bmm", [SQUARE, LEFT], 700, BF16, around=sdpa)

    assert handwritten_attention(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        handwritten_attention(without_shapes())
