"""Work between products is found by the bytes one pass over it would move; what is compiled or alone is not."""

from __future__ import annotations

import pytest
from device_cases import BF16, FP32, Program, without_shapes
from host_cases import recorded
from recorded_cases import run_script

from parametrized import parametrized
from stepscope.errors import Unavailable
from stepscope.findings.rules.casts_and_copies import needless_copies
from stepscope.findings.rules.fusion import unfused_elementwise

SHAPE = [8192, 3060]
"""25 million elements: 100,270,080 bytes in float32."""
BYTES = 4 * 8192 * 3060
FUSED_NS = 2 * BYTES / (4.8e12 * 0.57) * 1e9
"""One read and one write at 57 % of 4.8 TB/s: 73.3 µs."""


def started() -> Program:
    """A program whose host is ahead, behind a product: what comes next is a run of its own."""
    program = Program()
    program.op("aten::mm", [[64, 64], [64, 64]], 5)
    return program


def chain(program: Program, length: int) -> None:
    for _ in range(length):
        program.op("aten::tanh", [SHAPE], 100)


def test_a_chain_is_one_pass():
    program = started()
    chain(program, 6)

    (finding,) = unfused_elementwise(program.case())

    assert finding.saving_ns == pytest.approx(6 * 100_000 - FUSED_NS, abs=1)
    assert "Nothing in this step is compiled. 6 elementwise kernels per step" in finding.sentence
    assert "fused they would take 73.3 µs" in finding.sentence
    assert "torch.compile" in finding.fix


def test_what_the_run_reads_from_outside_is_moved():
    program = started()
    chain(program, 1)
    program.op("aten::addcmul", [SHAPE, SHAPE, SHAPE, []], 200)  # two tensors at hand, and a third

    (finding,) = unfused_elementwise(program.case())

    assert finding.saving_ns == pytest.approx(300_000 - 1.5 * FUSED_NS, abs=1)


def test_casts_and_small_tensors_belong_to_a_chain():
    """RMSNorm by hand: to float32, squared, its mean, one number per row, multiplied, and back."""
    program = started()
    rows = [SHAPE[0], 1]
    to = [("aten::to", [SHAPE, []], [BF16, ""])]
    program.op("aten::add", [SHAPE, SHAPE, []], 60, BF16)
    program.op("aten::copy_", [SHAPE, SHAPE, []], 140, [FP32, BF16, "Scalar"], around=to)
    program.op("aten::pow", [SHAPE, []], 50, inputs=["", "2"])
    program.op("aten::mean", [SHAPE, [], [], []], 30, inputs=["", "[-1]", "True", ""])
    program.op("aten::rsqrt", [rows], 2)
    program.op("aten::mul", [SHAPE, rows], 50)
    program.op("aten::copy_", [SHAPE, SHAPE, []], 140, [BF16, FP32, "Scalar"], around=to)

    case = program.case()
    (finding,) = unfused_elementwise(case)

    assert "7 elementwise kernels" in finding.sentence and "F.rms_norm" in finding.fix
    assert needless_copies(case) == [], "the casts are told once"


def test_products_end_a_run_and_one_kernel_is_none():
    program = started()
    for _ in range(6):
        chain(program, 1)
        program.op("aten::mm", [[8192, 3060], [3060, 3060]], 300)

    assert unfused_elementwise(program.case()) == []


def test_a_tensor_that_is_read_again_is_moved_once():
    """A norm by hand reads its input twice, and a residual adds it again."""
    program = started()
    chain(program, 1)
    program.op("aten::mul", [SHAPE, SHAPE], 150)
    program.op("aten::add", [SHAPE, SHAPE, []], 150)

    (finding,) = unfused_elementwise(program.case())

    assert finding.saving_ns == pytest.approx(400_000 - FUSED_NS, abs=1), "one tensor in, one out"


def test_a_norm_keeps_passes_of_its_own():
    program = started()
    chain(program, 2)
    program.op(
        "aten::native_layer_norm", [SHAPE, [], [3060], [3060], []], 400, inputs=["", "[3060]", "", "", "1e-05"]
    )

    (finding,) = unfused_elementwise(program.case())

    norm_ns = 2 * BYTES / (4.8e12 * 0.45) * 1e9
    assert finding.saving_ns == pytest.approx(600_000 - FUSED_NS - norm_ns, rel=0.01)


def test_what_is_fused_is_clean():
    program = started()
    for number in range(6):
        program.op(f"triton_poi_fused_mul_tanh_{number}", [SHAPE, SHAPE, []], 100)

    assert unfused_elementwise(program.case()) == []


def advice(*calls: str) -> str:
    """The fix for a run of calls: an op and, where needed, a second operand or the call that makes it."""
    operands = {"x": [SHAPE, SHAPE], "rows": [SHAPE, [SHAPE[0], 1]]}
    program = started()
    for call in calls:
        name, _, more = call.partition(" ")
        number = more if more.isdigit() else ""
        around = [(f"aten::{more}", [SHAPE], [FP32])] if more == "logsumexp" else []
        program.op(f"aten::{name}", operands.get(more, [SHAPE, []]), 100, FP32, inputs=["", number], around=around)
    (finding,) = unfused_elementwise(program.case())
    return finding.fix


def test_gelu_by_hand_is_named():
    fix = advice("mul", "pow 3", "mul", "add x", "mul", "tanh", "add", "mul x")

    assert fix.startswith('F.gelu(x, approximate="tanh")  # instead of mul, pow, mul, add, mul, tanh, add, mul;')


def test_a_built_in_that_computes_something_else_is_not_named():
    """An LSTM cell, a logsumexp by hand, and the built-in logsumexp, which is several ops itself."""
    cell = ("add x", "sigmoid", "mul x", "sigmoid", "tanh", "mul x", "add x", "sigmoid", "tanh", "mul x")
    by_hand = ("amax", "sub rows", "exp", "sum", "log", "add rows")
    built_in = [f"{name} logsumexp" for name in ("amax", "sub", "exp_", "sum", "log_", "add_")]

    for calls in (cell, by_hand, built_in):
        assert advice(*calls).startswith("model = torch.compile(model)")


def test_casts_belong_to_a_run_and_a_weight_s_is_moved_on_its_own():
    """Autocast casts a layer's weight, then what enters it."""
    program = started()
    linear = [("aten::linear", [SHAPE, [3060, 3060]], [FP32, FP32])]
    to_wide, to_narrow = [FP32, BF16, "Scalar"], [BF16, FP32, "Scalar"]
    program.op("aten::copy_", [SHAPE, SHAPE, []], 60, to_wide)
    chain(program, 3)
    program.op("aten::copy_", [[3060, 3060], [3060, 3060], []], 500, to_narrow, around=linear)
    program.op("aten::copy_", [SHAPE, SHAPE, []], 60, to_narrow, around=linear)

    (finding,) = unfused_elementwise(program.case())

    weight_ns = 6 * 3060**2 / (4.8e12 * 0.57) * 1e9
    assert finding.saving_ns == pytest.approx(920_000 - FUSED_NS / 2 - weight_ns, abs=1), (
        "half the bytes at both ends"
    )


def test_on_a_host_that_is_late_the_compiler_saves_launches():
    def pointwise(names: str) -> list:
        program = Program(pace=100)
        for name in names.split():
            program.op(f"aten::{name}", [[64, 64], []], 5)
        return unfused_elementwise(program.case())

    (merged,) = pointwise("neg exp neg exp neg exp")
    assert merged.saving_ns == pytest.approx(5 * 100_000, rel=0.05), "five of six launches"
    assert pointwise("pow mul add mul tanh add mul")[0].saving_ns > 500_000, "F.gelu is one launch"


def test_an_optimizer_is_another_rule():
    program = started()
    begin = program.at
    chain(program, 6)
    program.trace.annotation("Optimizer.step#SGD.step", begin, program.at - begin)

    assert unfused_elementwise(program.case()) == []


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        unfused_elementwise(without_shapes())


BYPASSED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        return self.layers(x)

    def outputs(self, x):
        return self.layers(x)


net = Net()
compiled = torch.compile(net, backend="eager")
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(9):
    loss = {called}(torch.randn(4, 8)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@parametrized(("called", "bypassed"), [("net", ["Net"]), ("compiled.outputs", ["Net"]), ("compiled", [])], quick=1)
def test_a_compiled_wrapper_that_is_never_called_is_noted(forks, tmp_path, called, bypassed):
    options = ("--warmup", "5", "--clean", "2", "--trace", "0", "--no-memory")
    case = run_script(forks, tmp_path, BYPASSED.format(called=called), *options)
    assert case.recording.facts["bypassed"] == bypassed


def test_the_finding_says_that_the_wrapper_is_bypassed(tmp_path):
    program = started()
    chain(program, 60)
    case = program.case(recorded(tmp_path, bypassed=["Net"]))
    (finding,) = unfused_elementwise(case)
    assert "has wrapped Net, but the step calls it without the wrapper" in finding.sentence
    assert "call that" in finding.fix
