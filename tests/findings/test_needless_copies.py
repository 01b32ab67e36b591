"""Copies that the program asked for: with their backward where there is one, without what the compiler left."""

from __future__ import annotations

from device_cases import BF16, Program

from stepscope.findings.rules import needless_copies

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
    return needless_copies.check(program.case())


def test_a_clone_of_the_program_without_a_backward():
    (finding,) = copying()

    assert finding.saving_ns >= 2_000_000
    assert "1 kernel a step only copy: clone called by the program" in finding.sentence
    assert "backward" not in finding.sentence


def test_its_backward_is_named_where_there_is_one():
    (finding,) = copying(has_backward=True)

    assert finding.sentence.endswith("without computing anything, their backward included.")


def test_what_the_compiler_left_in_its_code_is_not_the_programs():
    for around in ("CompiledFunction", "CompiledFunctionBackward", "Torch-Compiled Region: 0/0"):
        assert copying(around) == []
