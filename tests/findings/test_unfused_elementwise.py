"""Chains of elementwise ops are found by the bytes they move; what is fused, short or far apart is not."""

from __future__ import annotations

import pytest
from device_cases import BF16, FP32, Program, without_shapes

from stepscope.errors import Unavailable
from stepscope.findings.rules.casts_and_copies import needless_copies
from stepscope.findings.rules.fusion import unfused_elementwise

SHAPE = [8192, 3060]
"""25 million elements: 100,270,080 bytes in float32."""
BYTES = 4 * 8192 * 3060
FUSED_NS = 2 * BYTES / (4.8e12 * 0.85) * 1e9
"""One read and one write at 85 % of 4.8 TB/s: 49.15 µs."""


def chain(program: Program, length: int) -> None:
    for _ in range(length):
        program.op("aten::tanh", [SHAPE], 100)


def test_a_chain_is_one_pass():
    program = Program()
    chain(program, 6)

    (finding,) = unfused_elementwise(program.case())

    assert finding.saving_ns == pytest.approx(6 * 100_000 - FUSED_NS, abs=1)
    assert "6 elementwise kernels per step, in 1 chain" in finding.sentence
    assert "would move 191 MiB instead of 1.12 GiB" in finding.sentence
    assert "torch.compile" in finding.fix


def test_what_the_chain_reads_from_outside_is_moved():
    program = Program()
    chain(program, 3)
    program.op("aten::mul", [SHAPE, SHAPE], 150)  # by a tensor that none of them wrote

    (finding,) = unfused_elementwise(program.case())

    assert finding.saving_ns == pytest.approx(450_000 - 1.5 * FUSED_NS, abs=1)


def test_casts_and_small_tensors_belong_to_a_chain():
    """RMSNorm by hand: to float32, squared, its mean, a number a row, multiplied, and back."""
    program = Program()
    rows = [SHAPE[0], 1]
    to = [("aten::to", [SHAPE, []], [BF16, ""])]
    program.op("aten::add", [SHAPE, SHAPE, []], 60, BF16)
    program.op("aten::copy_", [SHAPE, SHAPE, []], 140, [FP32, BF16, "Scalar"], around=to)
    program.op("aten::pow", [SHAPE, []], 50)
    program.op("aten::mean", [SHAPE, [], [], []], 30, inputs=["", "[-1]", "True", ""])
    program.op("aten::rsqrt", [rows], 2)
    program.op("aten::mul", [SHAPE, rows], 50)
    program.op("aten::copy_", [SHAPE, SHAPE, []], 140, [BF16, FP32, "Scalar"], around=to)

    case = program.case()
    (finding,) = unfused_elementwise(case)

    assert "7 elementwise kernels" in finding.sentence and "F.rms_norm" in finding.fix
    assert needless_copies(case) == [], "the casts are told once"


def test_a_reduction_over_rows_of_another_kind_ends_a_chain():
    """The gradient of a bias sums over all tokens: no pass can go on with its result."""
    program = Program()
    chain(program, 2)
    program.op("aten::sum", [SHAPE, [], [], []], 100, inputs=["", "[0]", "False", ""])
    chain(program, 2)

    assert unfused_elementwise(program.case()) == []


def test_two_ops_and_products_between_are_no_chain():
    program = Program()
    for _ in range(6):
        chain(program, 2)
        program.op("aten::mm", [[8192, 3060], [3060, 3060]], 300)

    assert unfused_elementwise(program.case()) == []


def test_what_is_fused_is_clean():
    program = Program()
    for number in range(6):
        program.op(f"triton_poi_fused_mul_tanh_{number}", [SHAPE, SHAPE, []], 100)

    assert unfused_elementwise(program.case()) == []


def test_gelu_by_hand_is_named():
    program = Program()
    for name in ("pow", "mul", "add", "mul", "tanh", "add", "mul"):
        program.op(f"aten::{name}", [SHAPE, []], 100)

    (finding,) = unfused_elementwise(program.case())

    assert finding.fix.startswith('F.gelu(x, approximate="tanh")')


def test_the_casts_before_and_behind_belong_to_it_and_a_weight_s_between_does_not():
    """Autocast casts a layer's weight, then what enters it: 5 kernels of the chain's, and one of the weight's."""
    program = Program()
    linear = [("aten::linear", [SHAPE, [3060, 3060]], [FP32, FP32])]
    to_wide, to_narrow = [FP32, BF16, "Scalar"], [BF16, FP32, "Scalar"]
    program.op("aten::copy_", [SHAPE, SHAPE, []], 60, to_wide)
    chain(program, 3)
    program.op("aten::copy_", [[3060, 3060], [3060, 3060], []], 500, to_narrow, around=linear)
    program.op("aten::copy_", [SHAPE, SHAPE, []], 60, to_narrow, around=linear)

    (finding,) = unfused_elementwise(program.case())

    assert finding.saving_ns == pytest.approx(420_000 - FUSED_NS / 2, abs=1), "half as many bytes at both ends"


def test_on_a_host_that_is_late_the_compiler_saves_no_launches():
    def pointwise(names: str) -> list:
        program = Program(pace=100)
        for name in names.split():
            program.op(f"aten::{name}", [[64, 64], []], 5)
        return unfused_elementwise(program.case())

    assert pointwise("neg exp neg exp neg exp") == []
    assert pointwise("pow mul add mul tanh add mul")[0].saving_ns > 500_000, "F.gelu is one launch"


def test_an_optimizer_is_another_rule():
    program = Program()
    begin = program.at
    chain(program, 6)
    program.trace.annotation("Optimizer.step#SGD.step", begin, program.at - begin)

    assert unfused_elementwise(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        unfused_elementwise(without_shapes())
