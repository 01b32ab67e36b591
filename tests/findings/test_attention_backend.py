"""Attention on a slow back end is found with its reason; flash, cuDNN, masks and old devices are not told of."""

from __future__ import annotations

import pytest
from device_cases import BF16, FP32, Program, without_shapes

from stepscope.errors import Unavailable
from stepscope.findings.rules.attention import attention_backend, attention_mask

LENGTH, SIZE = 2048, 128
SDPA = "aten::scaled_dot_product_attention"
FLASH = 989.4e12 * 0.35 * LENGTH / (LENGTH + 512)


def flops(size: int = SIZE) -> int:
    """Of a forward over all scores: two products."""
    return 2 * 2 * 4 * 16 * LENGTH * LENGTH * size


def attend(
    program: Program,
    backend: str = "efficient",
    dtype: str = BF16,
    took: float = 4000,
    size: int = SIZE,
    mask: bool = False,
) -> None:
    shape = [4, LENGTH, 16, size]
    given = [shape, shape, shape, [4, 16, LENGTH, LENGTH] if mask else []]
    outer = [[4, 16, LENGTH, size]] * 3 + [given[3]]
    types = [dtype] * 3 + [dtype if mask else ""]
    program.op(f"aten::_{backend}_attention_forward", given, took, types, around=[(SDPA, outer, types)])


def on_math(program: Program, took: float = 1000) -> None:
    shape = [4, 16, LENGTH, SIZE]
    around = [(SDPA, [shape] * 3, [BF16] * 3)]
    products = [[64, LENGTH, LENGTH], [64, LENGTH, SIZE]]
    program.op("aten::bmm", products, took, BF16, around=around, kernels=["gemm", "softmax", "gemm"])


@pytest.mark.parametrize(
    ("options", "why", "fix"),
    [
        ({"dtype": FP32}, "the tensors are float32", "bfloat16"),
        ({"size": 320}, "the head size of 320 is larger than 256", "more heads"),
        ({"size": 100}, "nothing in the trace rules flash out", "remove sdpa_kernel"),  # flash pads it to 104
        ({}, "nothing in the trace rules flash out", "remove sdpa_kernel"),
    ],
)
def test_the_reason(options, why, fix):
    program = Program()
    attend(program, **options)

    (finding,) = attention_backend(program.case())

    assert "efficient backend" in finding.sentence and why in finding.sentence
    assert fix in finding.fix
    expected_ns = flops(options.get("size", SIZE)) / FLASH * 1e9
    assert finding.saving_ns == pytest.approx(4_000_000 - expected_ns, rel=1e-6)


def test_the_math_back_end_becomes_one_kernel():
    program = Program()
    on_math(program)

    (finding,) = attention_backend(program.case())

    assert "math backend" in finding.sentence
    assert finding.saving_ns == pytest.approx(3_000_000 - flops() / FLASH * 1e9, rel=1e-6)


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_the_fast_ones_are_clean(backend):
    program = Program()
    attend(program, backend)

    assert attention_backend(program.case()) == []


def test_one_call_is_told_by_one_rule():
    program = Program()
    attend(program, mask=True)
    case = program.case()
    assert attention_backend(case) == [] and attention_mask(case)

    program = Program()
    attend(program, mask=True, dtype=FP32)
    case = program.case()
    assert attention_mask(case) == []
    (finding,) = attention_backend(case)
    assert "4×16×2048×2048" in finding.sentence and "are float32" in finding.sentence


def test_a_device_without_flash_is_clean():
    program = Program(deviceProperties=[{"name": "Tesla V100-SXM2-32GB"}])
    attend(program)

    assert attention_backend(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        attention_backend(without_shapes())
