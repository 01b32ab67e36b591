"""float64 work, narrow products of one input, and loops over parameters are found; what looks alike is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_cases import BF16, FP32, Program, without_shapes
from host_cases import H200, case_of, recorded

from handmade import cpu_facts, sample, write_recording
from stepscope.errors import Unavailable
from stepscope.findings.rules.fusion import parameter_loop
from stepscope.findings.rules.padding import loss_scaling
from stepscope.findings.rules.switches import torch_switches
from stepscope.findings.rules.wide_and_narrow import float64_work, product_order, split_products
from stepscope.session import open_session
from stepscope.session.case import Case
from trace_builder import TraceBuilder

SHAPE = [4096, 4096]


def test_float64_work_is_as_long_as_its_bytes():
    program = Program()
    program.op("aten::mul", [SHAPE, SHAPE], 1000, "double")
    program.op("aten::mul", [SHAPE, SHAPE], 1000, FP32)

    (finding,) = float64_work(program.case())

    assert finding.saving_ns == pytest.approx(500_000, rel=0.01), "half of the bytes, of one of two"
    assert "1 kernel per step read or write float64" in finding.sentence


def test_where_float64_comes_in_is_named():
    program = Program()
    program.op("aten::sub", [SHAPE, SHAPE, []], 1000, [FP32, "double", "Scalar"])
    program.op("aten::mul", [SHAPE, SHAPE], 1000, "double")

    (finding,) = float64_work(program.case())

    # 4 + 8 read and 8 written become 12 of 20 bytes; 24 become 12.
    assert finding.saving_ns == pytest.approx(1_000_000 * 8 / 20 + 500_000, rel=0.01)
    assert "comes in at aten::sub" in finding.sentence


def test_float32_is_clean():
    program = Program()
    program.op("aten::mul", [SHAPE, SHAPE], 1000, FP32)

    assert float64_work(program.case()) == []


def heads(num: int, between: list[int] | None = None) -> Program:
    program = Program()
    for _ in range(num):
        program.op("aten::mm", [[32_768, 1024], [1024, 64]], 300, BF16)
        if between:
            program.op("aten::gelu", [between, []], 50, BF16)
    return program


def test_narrow_products_of_one_input_become_one():
    (finding,) = split_products(heads(16, between=[32_768, 64]).case())

    flops_ns = 16 * 2 * 32_768 * 1024 * 64 / (989.4e12 * 0.6) * 1e9
    assert finding.saving_ns == pytest.approx(16 * 300_000 - flops_ns, rel=0.01)
    assert "nn.Linear(1024, 1024)" in finding.fix


@pytest.mark.parametrize(
    "program",
    [heads(3), heads(16, between=[32_768, 1024])],
    ids=["query, key and value are three", "something writes the next input"],
)
def test_other_narrow_products_are_clean(program):
    assert split_products(program.case()) == []


def averaged(shapes: list[list[int]], op: str = "aten::lerp_", num: int = 48) -> Program:
    """A backward, an optimizer, and an op for one tensor after the other between it and the next forward."""
    program = Program(pace=50)
    first = program.op("aten::mm", [SHAPE, SHAPE], 100)
    program.op("aten::mm", [SHAPE, SHAPE], 100, backward=first)
    begin = program.at
    program.op("aten::_fused_adamw_", [[], [], []], 20)
    program.trace.annotation("Optimizer.step#AdamW.step", begin, program.at - begin)
    for number in range(num):
        shape = shapes[number % len(shapes)]
        program.op(op, [shape, shape, []], 3)
    return program


def linear_attention(between: str | None = None, batch: int = 64) -> Program:
    program = Program()
    program.op("aten::bmm", [[batch, 4096, 64], [batch, 64, 4096]], 1000, BF16)
    if between:
        program.op(between, [[batch, 4096, 4096], []], 500, BF16)
    program.op("aten::bmm", [[batch, 4096, 4096], [batch, 4096, 64]], 1000, BF16)
    return program


def test_a_product_of_three_in_the_order_of_least_work():
    (finding,) = product_order(linear_attention().case())

    assert finding.saving_ns == pytest.approx(2_000_000 * (1 - 64 * 64 * 8192 / (4096 * 4096 * 128)), rel=0.01)
    assert "2 % of the FLOPs" in finding.sentence


@pytest.mark.parametrize("between", ["aten::relu", "aten::_softmax"])
def test_what_works_on_the_matrix_in_between_keeps_the_order(between):
    assert product_order(linear_attention(between).case()) == []


SHAPES = [[1024], [1024, 1024], [4096, 1024]]


def test_a_loop_over_parameters_becomes_one_call():
    (finding,) = parameter_loop(averaged(SHAPES).case())

    assert finding.saving_ns == pytest.approx(47 * 50_000, rel=0.1), "the launches of all but one"
    assert "lerp_" in finding.sentence and "torch._foreach_lerp_" in finding.fix


@pytest.mark.parametrize(
    "program",
    [averaged(SHAPES, num=12), averaged([[1024]]), averaged(SHAPES, "aten::_foreach_lerp_")],
    ids=["few", "one shape: no parameters", "foreach"],
)
def test_other_loops_are_not_over_parameters(program):
    assert parameter_loop(program.case()) == []


@pytest.mark.parametrize(("dtype", "num"), [(BF16, 1), ("c10::Half", 0)])
def test_a_scaler_without_float16(dtype, num):
    program = Program()
    program.op("aten::mm", [SHAPE, SHAPE], 500, dtype)
    program.op("aten::_amp_foreach_non_finite_check_and_unscale_", [[], [], []], 300)

    found = loss_scaling(program.case())

    assert len(found) == num
    assert all(one.saving_ns == pytest.approx(300_000, rel=0.01) for one in found)


@pytest.mark.parametrize("rule", [float64_work, split_products, product_order, parameter_loop, loss_scaling])
def test_without_shapes_they_cannot_be_checked(rule):
    with pytest.raises(Unavailable, match="record_shapes=True"):
        rule(without_shapes())


CONVOLUTION = [[8, 64, 56, 56], [64, 64, 3, 3]]


def convolving(folder: Path, second: list[list[int]], **flags: bool) -> Case:
    """A GPU's recording, and a trace of two steps of one convolution each."""
    trace = TraceBuilder(**H200)
    for step, shapes in enumerate((CONVOLUTION, second)):
        begin = 1000 * step
        types = {"Input Dims": shapes, "Input type": [BF16, BF16]}
        trace.step(step + 1, begin, 1000).op("aten::cudnn_convolution", begin + 10, 50, id=step + 1, **types)
        trace.launch("cudnn_conv_fprop", begin + 15, (begin + 30, 900), id=step + 1)
    return case_of(trace, recorded(folder, flags=flags))


def test_switches_that_slow_a_step(tmp_path):
    (found,) = torch_switches(convolving(tmp_path / "a", CONVOLUTION, **{"cudnn.benchmark": False}))
    assert "cudnn.benchmark = True" in found.fix and found.saving_ns is None

    other = [[8, 64, 57, 57], [64, 64, 3, 3]]
    assert torch_switches(convolving(tmp_path / "b", other, **{"cudnn.benchmark": False})) == []
    assert torch_switches(convolving(tmp_path / "c", CONVOLUTION, **{"cudnn.benchmark": True})) == []

    (found,) = torch_switches(convolving(tmp_path / "d", CONVOLUTION, deterministic_algorithms=True))
    assert "use_deterministic_algorithms(False)" in found.fix


def test_what_cudnn_may_do_changes_nothing_on_a_cpu(tmp_path):
    flags = {"cudnn.deterministic": True}
    assert len(torch_switches(convolving(tmp_path / "gpu", CONVOLUTION, **flags))) == 1
    on_cpu = write_recording(tmp_path / "cpu", cpu_facts(trace=None, flags=flags), [sample(0)])
    assert torch_switches(open_session(on_cpu, use_cache=False).case) == []


def test_without_switches_they_cannot_be_checked(tmp_path):
    with pytest.raises(Unavailable, match="Record it again"):
        torch_switches(case_of(None, recorded(tmp_path)))
