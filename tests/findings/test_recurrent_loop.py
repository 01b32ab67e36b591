"""Recurrent cells that a loop steps through time are found; layers, and loops that are no recurrence, are not."""

from __future__ import annotations

import pytest
from device_cases import BF16, Outer, Program, without_shapes

from parametrized import parametrized
from stepscope.errors import Unavailable
from stepscope.findings.rules.recurrence import recurrent_loop

ROWS, WIDTH, TURNS = 256, 1024, 32
GATES, STATE, WEIGHT = [ROWS, 3 * WIDTH], [ROWS, WIDTH], [3 * WIDTH, WIDTH]
SEQUENCE = [ROWS, TURNS, WIDTH]
PEAK, BANDWIDTH = 989.4e12 * 0.6, 4.8e12 * 0.85
PRODUCT_US = 2 * ROWS * WIDTH * 3 * WIDTH * TURNS / PEAK * 1e6
"""One product of all time steps, of the state's width and three gates."""
CELL: tuple[Outer, ...] = (("aten::gru_cell", [STATE, STATE], [BF16, BF16]),)


def gru(pace: float = 0.0, around: tuple[Outer, ...] = CELL) -> Program:
    """A GRU's cell, with the backward of each time step and of the index that takes it from the sequence."""
    program = Program(pace)
    forward = []
    for _ in range(TURNS):
        inputs = program.op("aten::mm", [STATE, WEIGHT[::-1]], 10, BF16, around=around)
        state = program.op("aten::mm", [STATE, WEIGHT[::-1]], 10, BF16, around=around)
        gates = [GATES, GATES, STATE]
        gate = program.op("aten::_thnn_fused_gru_cell", gates, 4, BF16, around=around)
        forward.append((inputs, state, gate))
    for turn, (inputs, state, gate) in enumerate(reversed(forward)):
        gates = [STATE, [ROWS, 5 * WIDTH], []]
        program.op("aten::_thnn_fused_gru_cell_backward", gates, 5, BF16, backward=gate)
        for node in (state, inputs):
            program.op("aten::sum", [GATES, [], [], []], 7, BF16, backward=node)
            program.op("aten::mm", [GATES[::-1], STATE], 15, BF16, backward=node)
            program.op("aten::mm", [GATES, WEIGHT], 9, BF16, backward=node)
            if turn:
                program.op("aten::add_", [WEIGHT, WEIGHT, []], 8, BF16, backward=node)
                program.op("aten::add_", [[3 * WIDTH], [3 * WIDTH], []], 1, BF16, backward=node)
        program.op("aten::fill_", [SEQUENCE, []], 20, BF16, backward=inputs)
        program.op("aten::copy_", [STATE, STATE, []], 3, BF16, backward=inputs)
        if turn:
            program.op("aten::add_", [SEQUENCE, SEQUENCE, []], 60, BF16, backward=inputs)
    return program


def test_a_loop_over_gru_cells():
    (finding,) = recurrent_loop(gru().case())

    products = TURNS * 10 + 2 * TURNS * 15 + TURNS * 9 - 4 * PRODUCT_US
    summed = 2 * TURNS * 7 - 2 * TURNS * ROWS * 3 * WIDTH * 2 / BANDWIDTH * 1e6
    added = 2 * (TURNS - 1) * (8 + 1)
    indexed = TURNS * (20 + 3) + (TURNS - 1) * 60
    assert finding.saving_ns == pytest.approx((products + summed + added + indexed) * 1000, rel=0.01)
    assert "nn.GRUCell through time: 32 calls per step" in finding.sentence
    assert "2.50 ms of it is the backward of indexing" in finding.sentence, "fill_ and add_"
    assert "nn.GRU(1024, 1024, batch_first=True)" in finding.fix
    assert (finding.confidence, finding.upper_bound) == ("high", False)


def test_a_loop_over_cells_on_a_host_that_is_late():
    """Each op takes the host 50 µs: what remains of the loop is the work of its kernels."""
    program = gru(pace=50)
    (finding,) = recurrent_loop(program.case())

    left_us = TURNS * (10 + 4 + 9 + 5) + 4 * PRODUCT_US
    assert finding.saving_ns == pytest.approx((50 * program.num_ops - left_us) * 1000, rel=0.02)


def rnn(
    turns: int = 16,
    shared: bool = True,
    between: str | None = None,
    cat: bool = False,
    summed: bool = True,
    took: float = 4,
) -> Program:
    """A tanh of two products by hand; the gradients of weights are added up if all turns share them."""
    program = Program()
    rows, inner, width = 64, 256, 512
    forward = []
    for _ in range(turns):
        if cat:
            program.op("aten::cat", [[[rows, inner], [rows, width]], []], took, BF16)
            inputs = state = program.op("aten::mm", [[rows, inner + width], [inner + width, width]], 10, BF16)
        else:
            inputs = program.op("aten::mm", [[rows, inner], [inner, width]], 10, BF16)
            state = program.op("aten::mm", [[rows, width], [width, width]], 10, BF16)
        if summed:
            program.op("aten::add", [[rows, width], [rows, width], []], took, BF16)
        program.op("aten::tanh", [[rows, width]], took, BF16)
        if between:
            program.op(between, [[rows, width], [], []], 3, BF16)
        forward.append((inputs, state))
    for turn, (inputs, state) in enumerate(reversed(forward)):
        for node, size in ((state, inner + width),) if cat else ((state, width), (inputs, inner)):
            program.op("aten::mm", [[size, rows], [rows, width]], 12, BF16, backward=node)
            if turn and shared:
                program.op("aten::add_", [[size, width], [size, width], []], 6, BF16, backward=node)
        program.op("aten::mm", [[rows, width], [width, width]], 11, BF16, backward=state)
    return program


def test_a_recurrence_by_hand_keeps_what_reads_its_state():
    (finding,) = recurrent_loop(rnn().case())

    # The input's products and gradients become one each; the sum before the tanh goes with it.
    moved = 2 * (16 * 64 * (256 + 512) + 256 * 512)
    one_us = max(3.0, moved / BANDWIDTH * 1e6)
    assert finding.saving_ns == pytest.approx((16 * (10 + 12) + 15 * 6 + 16 * 4 - 2 * one_us) * 1000, rel=0.01)
    assert "a recurrent cell written by hand through time: 16 calls" in finding.sentence
    assert "nn.RNN if it computes the same" in finding.fix and "unbind" in finding.fix
    assert (finding.confidence, finding.upper_bound) == ("medium", True)


def test_an_input_joined_with_the_state_is_one_product():
    (finding,) = recurrent_loop(rnn(cat=True, summed=False, took=20).case())

    assert finding.saving_ns == pytest.approx(15 * 20_000, rel=0.01), "one kernel is left of cat and tanh"


@parametrized(
    "program",
    [
        rnn(turns=15),
        rnn(shared=False),
        rnn(summed=False),
        rnn(between="aten::_softmax"),
        rnn(between="aten::argmax"),
    ],
    quick=3,
    ids=["few", "layers with a weight each", "two branches", "attention", "chooses its next input"],
)
def test_other_loops_with_gates_are_clean(program):
    assert recurrent_loop(program.case()) == []


def blocks(rows: int, shared: bool = False) -> Program:
    program = Program()
    nodes = []
    for _ in range(24):
        nodes.append(program.op("aten::mm", [[rows, 768], [768, 3072]], 60, BF16))
        program.op("aten::add", [[rows, 3072], [rows, 3072], []], 5, BF16)
        program.op("aten::tanh", [[rows, 3072]], 20, BF16)
        program.op("aten::mm", [[rows, 3072], [3072, 768]], 60, BF16)
    for node in reversed(nodes):
        program.op("aten::mm", [[768, rows], [rows, 3072]], 60, BF16, backward=node)
        if shared:
            program.op("aten::add_", [[768, 3072], [768, 3072], []], 20, BF16, backward=node)
    return program


@pytest.mark.parametrize(
    "program", [blocks(16_384), blocks(64), blocks(64, shared=True)], ids=["big", "small", "tied"]
)
def test_blocks_of_a_transformer_are_clean(program):
    assert recurrent_loop(program.case()) == []


def test_without_a_backward_it_may_be_a_rollout():
    program = Program()
    for _ in range(TURNS):
        for _ in range(2):
            program.op("aten::mm", [STATE, WEIGHT[::-1]], 10, BF16, around=CELL)
        program.op("aten::_thnn_fused_gru_cell", [GATES, GATES, STATE], 4, BF16, around=CELL)

    assert recurrent_loop(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        recurrent_loop(without_shapes())
