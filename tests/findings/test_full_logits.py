"""Logits held whole are found by time and by bytes; chunks of them and other wide layers are not."""

from __future__ import annotations

import pytest
from device_cases import BF16, FP32, INT64, Program, without_shapes
from host_cases import case_of, recorded

from stepscope.errors import Unavailable
from stepscope.findings.rules.memory import full_logits
from stepscope.findings.rules.padding import ignored_labels

TOKENS, WIDTH, WORDS = 8192, 1024, 65536
LOGITS = [TOKENS, WORDS]
SIZE = TOKENS * WORDS
FUSED_NS = 3 * SIZE * 2 / (4.8e12 * 0.5) * 1e9
"""Read in the forward, read and written in the backward, at half of 4.8 TB/s: 1.34 ms."""
GIB = 1 << 30


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

    (finding,) = full_logits(program.case())

    assert finding.saving_ns == pytest.approx(4_520_000 - FUSED_NS, abs=1)
    assert "8,192 tokens × 65,536 vocabulary) take 1.00 GiB" in finding.sentence and "4 kernels" in finding.sentence
    assert finding.saving_bytes is None and finding.upper_bound


@pytest.mark.parametrize("num_ignored", [3 * TOKENS // 4, TOKENS // 8])
def test_logits_of_labels_that_the_loss_ignores(tmp_path, num_ignored):
    """GIVEN three quarters of the labels ignored THEN as much of the last layer and of the loss; else nothing."""
    counts = {"num_positions": 0, "num_used": 0, "num_to_longest": 0}
    program = Program()
    backward(program, loss(program))
    end = program.runs + 10
    program.trace.call("cudaDeviceSynchronize", program.at, program.runs - program.at)
    program.trace.step(1, 0, end)
    recorded(tmp_path, padding={**counts, "num_labels": TOKENS, "num_ignored": num_ignored})
    case = case_of(program.trace, tmp_path)

    found = ignored_labels(case)

    if num_ignored < TOKENS // 4:
        assert found == []
    else:
        (finding,) = found
        assert finding.saving_ns == pytest.approx(0.75 * case.logits["duration_ns"].sum(), rel=0.01)
        assert case.logits["is_product"].sum() == 2, "the products of the last layer count"
        assert "75 % of the" in finding.sentence


def test_bytes_alive_at_the_peak():
    program = Program()
    weights = 1 << 29
    program.memory(weights, 1 << 40, weights)
    number = loss(program)
    program.memory(4 * SIZE, 2 << 40, weights + 4 * SIZE)
    program.memory(2 * SIZE, 3 << 40, weights + 6 * SIZE, ahead=4)
    backward(program, number)

    (finding,) = full_logits(program.case())

    assert finding.saving_bytes == 4 * SIZE, "all but the logits once"
    assert finding.fix.startswith("loss = torch.compile(head_and_loss)")
    assert "3.00 GiB of the 3.50 GiB peak" in finding.sentence


def compiled(weights: int) -> Program:
    """A loss in one pass each way, as Inductor makes it, with the logits and their gradient in memory."""
    program = Program()
    program.memory(weights, 1 << 40, weights)
    number = program.op("aten::mm", [[TOKENS, WIDTH], [WIDTH, WORDS]], 1500, BF16)
    program.op("triton_red_fused__log_softmax_0", [LOGITS, []], 700, [BF16, FP32])
    program.memory(2 * SIZE, 2 << 40, weights + 2 * SIZE)
    program.memory(2 * SIZE, 3 << 40, weights + 4 * SIZE, ahead=4)
    program.op("triton_red_fused__log_softmax_backward_data_1", [LOGITS, []], 700, [BF16, FP32], backward=number)
    program.op("aten::mm", [[WORDS, TOKENS], [TOKENS, WIDTH]], 1500, BF16, backward=number)
    return program


def test_a_compiled_loss_is_as_fast_as_it_can_be():
    assert full_logits(compiled(GIB).case()) == []


def test_of_a_compiled_loss_chunks_save_memory_where_it_is_short(monkeypatch):
    monkeypatch.setattr("stepscope.findings.rules.memory._SHORT_SHARE", 0.2)

    (finding,) = full_logits(compiled(30 * GIB).case())

    assert finding.saving_ns is None and finding.saving_bytes == 4 * SIZE * 7 // 8
    assert "chunks" in finding.fix and "costs time" in finding.derived


def test_chunks_are_clean():
    program = Program()
    for _ in range(8):
        loss(program, TOKENS // 8)

    assert full_logits(program.case()) == []


def test_micro_batches_are_no_chunks():
    program = Program()
    for _ in range(2):
        backward(program, loss(program))

    (finding,) = full_logits(program.case())
    assert finding.saving_ns == pytest.approx(2 * (4_520_000 - FUSED_NS), abs=1)


def test_a_wide_layer_without_a_loss_is_clean():
    program = Program()
    program.op("aten::mm", [[TOKENS, WIDTH], [WIDTH, WORDS]], 1500, BF16)
    program.op("aten::gelu", [LOGITS], 1500, BF16)

    assert full_logits(program.case()) == []


def test_a_small_vocabulary_is_clean():
    program = Program()
    program.op("aten::mm", [[TOKENS, WIDTH], [WIDTH, 1000]], 1500, BF16)
    program.op("aten::_log_softmax", [[TOKENS, 1000], [], []], 1500)

    assert full_logits(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        full_logits(without_shapes())
