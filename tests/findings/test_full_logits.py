"""Logits held whole are found by time and by bytes; chunks of them and other wide layers are not."""

from __future__ import annotations

import pytest
from device_cases import BF16, FP32, INT64, Program, without_shapes

from stepscope.findings.finding import CannotCheck
from stepscope.findings.rules import full_logits

TOKENS, WIDTH, WORDS = 8192, 1024, 65536
LOGITS = [TOKENS, WORDS]
SIZE = TOKENS * WORDS
FUSED_NS = 3 * SIZE * 2 / (4.8e12 * 0.85) * 1e9


def loss(program: Program, num_tokens: int = TOKENS) -> int:
    logits = [num_tokens, WORDS]
    number = program.op("aten::mm", [[num_tokens, WIDTH], [WIDTH, WORDS]], 1500, BF16)
    program.op("aten::copy_", [logits, logits, []], 1200, [FP32, BF16, "Scalar"])
    program.op("aten::_log_softmax", [logits, [], []], 1500, inputs=["", "1", "False"])
    program.op("aten::nll_loss_forward", [logits, [num_tokens]], 20, [FP32, INT64])
    return number


def backward(program: Program, number: int) -> None:
    program.op("aten::_log_softmax_backward_data", [LOGITS, LOGITS, [], []], 1800, backward=number)
    program.op("aten::mm", [[WORDS, TOKENS], [TOKENS, WIDTH]], 1500, BF16, backward=number)


def test_the_passes_become_one():
    program = Program()
    backward(program, loss(program))

    (finding,) = full_logits.check(program.case())

    assert finding.saving_ns == pytest.approx(4_520_000 - FUSED_NS, abs=1)
    assert "8,192 tokens × 65,536 words, 1.00 GiB" in finding.sentence and "4 kernels a step" in finding.sentence
    assert finding.saving_bytes is None and finding.upper_bound


def test_bytes_alive_at_the_peak():
    program = Program()
    weights = 1 << 29
    program.memory(weights, 1 << 40, weights)
    number = loss(program)
    program.memory(4 * SIZE, 2 << 40, weights + 4 * SIZE)
    program.memory(2 * SIZE, 3 << 40, weights + 6 * SIZE, ahead=4)
    backward(program, number)

    (finding,) = full_logits.check(program.case())

    assert finding.saving_bytes == 6 * SIZE * 7 // 8, "all but one of eight chunks"
    assert "3.00 GiB of the peak of 3.50 GiB in all copies" in finding.sentence


def test_chunks_are_clean():
    program = Program()
    for _ in range(8):
        loss(program, TOKENS // 8)

    assert full_logits.check(program.case()) == []


def test_micro_batches_are_no_chunks():
    program = Program()
    for _ in range(2):
        backward(program, loss(program))

    (finding,) = full_logits.check(program.case())
    assert finding.saving_ns == pytest.approx(2 * (4_520_000 - FUSED_NS), abs=1)


def test_a_wide_layer_without_a_loss_is_clean():
    program = Program()
    program.op("aten::mm", [[TOKENS, WIDTH], [WIDTH, WORDS]], 1500, BF16)
    program.op("aten::gelu", [LOGITS], 1500, BF16)

    assert full_logits.check(program.case()) == []


def test_a_small_vocabulary_is_clean():
    program = Program()
    program.op("aten::mm", [[TOKENS, WIDTH], [WIDTH, 1000]], 1500, BF16)
    program.op("aten::_log_softmax", [[TOKENS, 1000], [], []], 1500)

    assert full_logits.check(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(CannotCheck, match="record_shapes=True"):
        full_logits.check(without_shapes())
