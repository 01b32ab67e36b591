"""Copies that the program asked for: with their backward where there is one, without what the compiler left."""

from __future__ import annotations

from device_cases import BF16, FP32, Program

from stepscope.findings.rules.casts_and_copies import needless_copies

SHAPE = [4096, 4096]


def copying(around: str | None = None, has_backward: bool = False, took_us: float = 2000) -> list:
    program = Program()
    outer = [(around, [SHAPE], [BF16])] if around else []
    number = program.op(
        "aten::copy_", [SHAPE, SHAPE], took_us, BF16, around=[*outer, ("aten::clone", [SHAPE], [BF16])]
    )
    program.op("aten::mm", [SHAPE, SHAPE], 1000, BF16)
    if has_backward:
        program.op(
            "aten::copy_", [SHAPE, SHAPE], took_us, BF16, around=[("aten::clone", [SHAPE], [BF16])], backward=number
        )
    return needless_copies(program.case())


def test_a_clone_of_the_program_without_a_backward():
    (finding,) = copying()

    assert finding.saving_ns >= 2_000_000
    assert "1 kernel per step only copies tensors, because the program calls clone" in finding.sentence
    assert "backward" not in finding.sentence


def test_its_backward_is_named_where_there_is_one():
    (finding,) = copying(has_backward=True)

    assert "including the backward" in finding.sentence


def test_what_the_compiler_left_in_its_code_is_not_the_programs():
    for around in ("CompiledFunction", "CompiledFunctionBackward", "Torch-Compiled Region: 0/0"):
        assert copying(around) == []


def test_a_cast_that_a_checkpoint_runs_again_and_its_backward_are_no_way_there_and_back():
    """Logits in chunks: to float32 for the loss, once more in the backward, and their gradient to bfloat16."""
    program = Program()
    to, widen, narrow = [("aten::to", [SHAPE, []], [BF16, ""])], [FP32, BF16, "Scalar"], [BF16, FP32, "Scalar"]
    number = program.op("aten::copy_", [SHAPE, SHAPE, []], 2000, widen, around=to)
    program.op("aten::copy_", [SHAPE, SHAPE, []], 2000, widen, around=to, recomputed_in=number)
    program.op("aten::copy_", [SHAPE, SHAPE, []], 2000, narrow, around=to, backward=number)

    assert needless_copies(program.case()) == []
