"""Gradients of parameters that no optimizer has, and tables of which a step looks up few rows."""

from __future__ import annotations

import pytest
import torch
from device_cases import Program, without_shapes
from host_cases import case_of, recorded
from recorded_cases import run_script
from torch import nn

from parametrized import parametrized
from stepscope.errors import Unavailable
from stepscope.findings.rules import memory
from stepscope.findings.rules.unused_results import graph_without_backward, untouched_rows, unused_gradients
from stepscope.recorder.model import without_optimizer

PRODUCT = [[4096, 4096], [4096, 4096]]


def case_with_modules(folder, order, unused):
    """A forward of modules in some order, with a backward of 1 ms each in the reverse order."""
    program = Program()
    numbers = []
    for module in order:
        begin = program.at
        numbers.append(program.op("aten::mm", PRODUCT, 500))
        program.trace.annotation(f"stepscope.module/{module}", begin - 0.1, program.at - begin)
    for number in reversed(numbers):
        program.op("aten::mm", PRODUCT, 1000, backward=number)
    end = program.runs + 10
    program.trace.call("cudaDeviceSynchronize", program.at, program.runs - program.at)
    program.trace.step(1, 0, end)
    facts = [{"module": module, "num_parameters": 7_000_000} for module in unused]
    parameters = {"num_total": 1, "num_trainable": 1, "bytes_by_dtype": {}, "without_optimizer": facts}
    return case_of(program.trace, recorded(folder, parameters=parameters))


def test_a_frozen_encoder_before_all_that_is_trained_needs_no_backward(tmp_path):
    (found,) = unused_gradients(case_with_modules(tmp_path, ["encoder.first", "encoder.last", "head"], ["encoder"]))

    assert found.saving_ns == pytest.approx(2_000_000, rel=0.02)
    assert "7.00 M trainable parameters of encoder" in found.sentence and "no_grad" in found.fix


def test_gradients_pass_through_what_comes_after_something_trained(tmp_path):
    (found,) = unused_gradients(case_with_modules(tmp_path, ["generator", "judge"], ["judge"]))

    assert found.saving_ns == pytest.approx(500_000, rel=0.02), "the weights' half of 1 ms"
    assert found.fix == "judge.requires_grad_(False)"


def test_without_such_modules_there_is_nothing_to_find(tmp_path):
    assert unused_gradients(case_with_modules(tmp_path / "a", ["encoder", "head"], [])) == []
    with pytest.raises(Unavailable, match="Record it again"):
        unused_gradients(case_of(None, recorded(tmp_path / "b")))


def test_the_largest_modules_without_an_optimizer_are_named():
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 2)})
    model["frozen"] = nn.Linear(3, 3).requires_grad_(False)
    head = {id(p) for p in model["head"].parameters()}

    assert without_optimizer([model], head) == [{"module": "encoder", "num_parameters": 40}]
    assert without_optimizer([model["encoder"], model["head"]], head) == [
        {"module": "Sequential", "num_parameters": 40}
    ]
    assert without_optimizer([model], {id(p) for p in model.parameters()}) == []
    assert without_optimizer([model], {id(torch.zeros(1))}) == [], "it updates copies"


def table_case(num_lookups, is_multiplied=False):
    table, width = [1_000_000, 64], 64
    program = Program()
    inputs = ["", "", "1000000", "-1", "False"]
    program.op("aten::embedding_dense_backward", [[num_lookups, width], [num_lookups], [], [], []], 50, inputs=inputs)
    program.op("aten::fill_", [table, []], 400)
    program.op("aten::_fused_adam_", [[table, [1000, 64_000]], [table, [1000, 64_000]]], 1600)
    if is_multiplied:
        program.op("aten::mm", [[8, 64], [64, 1_000_000]], 100)
        program.op("aten::mm", [table, [64, 8]], 100)
    return program.case()


def test_a_table_of_which_few_rows_are_looked_up():
    (found,) = untouched_rows(table_case(100_000))

    # Nine tenths of filling it, and of its half of the update.
    assert found.saving_ns == pytest.approx(0.9 * 400_000 + 0.9 * 800_000, rel=0.02)
    assert "at most 100,000 of the 1,000,000 rows" in found.sentence


@pytest.mark.parametrize(("num_lookups", "is_multiplied"), [(600_000, False), (100_000, True)])
def test_a_table_that_is_needed_as_a_whole(num_lookups, is_multiplied):
    assert untouched_rows(table_case(num_lookups, is_multiplied)) == []


def test_rows_need_shapes():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        untouched_rows(without_shapes())


DISTILL = """
import torch
from torch import nn

def model(width, depth):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])

teacher, student = model(256, 6), model(256, 2)
optimizer = torch.optim.SGD(student.parameters(), 0.1)
for step in range(14):
    x = torch.randn(2000, 256)
    with torch.set_grad_enabled({has_grad}):
        target = teacher(x)
        hidden = [layer(x) for layer in teacher]
    loss = nn.functional.mse_loss(student(x), target.detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@parametrized(("has_grad", "num_findings"), [(True, 1), (False, 0)], quick=1)
def test_a_teacher_that_keeps_its_graph(forks, tmp_path, monkeypatch, has_grad, num_findings):
    monkeypatch.setattr(memory, "_LEAST_BYTES", 1 << 20)
    options = ("--warmup", "5", "--clean", "2", "--trace", "0")
    case = run_script(forks, tmp_path, DISTILL.format(has_grad=has_grad), *options)

    findings = graph_without_backward(case)
    assert len(findings) == num_findings
    if findings:
        assert findings[0].evidence[0].rows[0]["module"] in findings[0].sentence
        assert findings[0].saving_bytes >= 10 * 2000 * 256 * 4, "of twelve layers"


COMPARED = """
import torch
from torch import nn

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = (nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)]) for _ in range(2))
    def forward(self, x):
        hidden = self.student(x)
        return hidden, self.teacher({of})

net = Both()
optimizer = torch.optim.SGD(net.student.parameters(), 0.01)
for step in range(14):
    hidden, target = net(torch.randn(512, 512))
    loss = nn.functional.mse_loss(hidden, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("of", "has_none"), [("x", True), ("hidden", False)])
def test_a_teacher_that_runs_after_what_is_trained(forks, tmp_path, of, has_none):
    """Only if it reads what is trained do its gradients lead to an update, and then those of its weights do not."""
    options = ("--warmup", "4", "--clean", "3", "--trace", "2")
    case = run_script(forks, tmp_path, COMPARED.format(of=of), *options)

    (found,) = unused_gradients(case)

    (row,) = found.evidence[0].rows
    assert row["module"] == "teacher" and row["is_first"] == has_none
    assert ("no_grad" in found.fix) == has_none
    share = found.saving_ns / row["backward_ns"]
    assert 0.9 < share < 1.1 if has_none else 0.2 < share < 0.8


def test_without_the_modules_of_the_graph_it_cannot_look(tmp_path):
    with pytest.raises(Unavailable):
        graph_without_backward(case_with_modules(tmp_path, ["encoder", "head"], []))
