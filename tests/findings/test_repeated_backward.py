"""Passes that run the same nodes of autograd again are found; those with new nodes, or that are needed, are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from host_cases import H200, case_of
from recorded_cases import run_script

from parametrized import parametrized
from stepscope.analysis.structure.backward_passes import backward_passes
from stepscope.analysis.structure.repeated_passes import Repeated, repeated_passes
from stepscope.errors import Unavailable
from stepscope.findings.rules.repeated_work import repeated_backward
from stepscope.session.case import Case
from trace_builder import AUTOGRAD, MAIN, TraceBuilder

NODE = "autograd::engine::evaluate_function: "
LOSSES = [("Mean", 5), ("Tanh", 2), ("Addmm", 1)], [("Mean", 6), ("Tanh", 2), ("Addmm", 1)]
WEIGHT = [[64, 32]]


class Script:
    """A step whose forward has made nodes 1 to 9, and whose passes have a kernel of 1 ms for each node they run."""

    def __init__(self, has_shapes: bool = True) -> None:
        self.trace, self.at, self.runs = TraceBuilder(**H200), 10.0, 10.0
        self._sizes = {"Input Dims": WEIGHT, "Concrete Inputs": [""]} if has_shapes else {}
        for number in range(1, 10):
            self.op("aten::mm", sequence=number)

    def op(self, name: str, runs: float = 0, thread: int = MAIN, **numbers: int) -> None:
        number = len(self.trace.events) + 1
        self.trace.op(name, self.at, 8, thread, id=number, **numbers, **self._sizes)
        if runs:
            begin = max(self.runs, self.at + 5)
            self.trace.launch(name, self.at + 1, runs=(begin, runs), thread=thread, id=number)
            self.runs = begin + runs
        self.at += 10

    def passes(self, nodes: Sequence[tuple[str, int]], before: str = "aten::ones_like", adds: str = "") -> None:
        """A pass after an op; `adds` is what it does to a gradient that is there."""
        self.op(before)
        for name, number in nodes:
            begin = self.at
            back = {"sequence": number, "forward_thread": 1}
            self.op("aten::mm", runs=1000, thread=AUTOGRAD)
            size = {"Input Dims": [[8, 8]], "Concrete Inputs": [str(number)]} if self._sizes else {}
            self.trace.op(f"{NODE}{name}Backward0", begin - 2, 12, AUTOGRAD, **back, **size)
            self.trace.op(f"{name}Backward0", begin - 1, 10, AUTOGRAD, **back, **size)
            self.at += 5
        if adds:
            begin = self.at
            self.op(adds, thread=AUTOGRAD)
            self.trace.op(f"{NODE}torch::autograd::AccumulateGrad", begin - 2, 12, AUTOGRAD)
            self.trace.op("torch::autograd::AccumulateGrad", begin - 1, 10, AUTOGRAD)
            self.at += 5

    def case(self) -> Case:
        self.trace.call("cudaDeviceSynchronize", self.at, max(1.0, self.runs - self.at))
        self.trace.step(1, 0, max(self.at, self.runs) + 10)
        return case_of(self.trace)


def found_in(case: Case) -> Repeated:
    host = case.linked.host
    return repeated_passes(backward_passes(host, case.work["step"].drop_nulls().unique()), host)


def test_two_calls_for_the_inputs_of_one_output():
    script = Script()
    for _ in range(2):
        script.passes([("Pow", 4), ("Tanh", 2), ("Addmm", 1)])

    (finding,) = repeated_backward(script.case())

    assert finding.saving_ns == pytest.approx(3_000_000, rel=0.02), "three nodes of 1 ms"
    assert finding.sentence.startswith("2 backward passes per step begin at only 1 output")


@pytest.mark.parametrize("before", ["aten::select", "aten::randn_like"])
def test_another_gradient_comes_in(before):
    script = Script()
    for _ in range(2):
        script.passes([("Pow", 4), ("Tanh", 2), ("Addmm", 1)], before)

    assert not found_in(script.case()).same.gone


@pytest.mark.parametrize("num_passes, num_again", [(2, 0), (4, 4)])
def test_without_shapes_a_node_of_two_outputs_may_be_begun_at_either(num_passes, num_again):
    script = Script(has_shapes=False)
    for _ in range(num_passes):
        script.passes([("Split", 4), ("Addmm", 1)])
        script.trace.op("aten::zeros", script.at - 28, 2, AUTOGRAD)  # in the split: the gradient of the other output

    assert len(found_in(script.case()).same.gone) == num_again


def test_losses_that_add_to_the_same_gradients():
    script = Script()
    for nodes, adds in zip(LOSSES, ("aten::clone", "aten::add_"), strict=True):
        script.passes(nodes, adds=adds)

    (finding,) = repeated_backward(script.case())

    assert finding.saving_ns == pytest.approx(2_000_000, rel=0.03), "two nodes that both run"
    assert "add to the same gradients" in finding.sentence and "(loss_a + loss_b)" in finding.fix


@pytest.mark.parametrize("between", ["aten::zero_", "aten::clone", "aten::_foreach_norm"])
def test_gradients_that_are_read_or_cleared_between_passes_are_needed_apart(between):
    script = Script()
    script.passes(LOSSES[0], adds="aten::clone")
    script.op(between)
    script.passes(LOSSES[1], adds="aten::add_")

    assert repeated_backward(script.case()) == []


def test_gradients_that_replace_others_are_needed_apart():
    script = Script()
    for nodes in LOSSES:
        script.passes(nodes, adds="aten::clone")

    assert repeated_backward(script.case()) == []


@pytest.mark.parametrize("num_rows", [3, 4])
def test_one_pass_for_each_row(num_rows):
    script = Script()
    for number in range(num_rows):
        script.passes([("Select", 5 + number), ("Tanh", 2), ("Addmm", 1)])

    found = found_in(script.case())

    assert not found.same.gone and [len(rows) for rows in found.rows] == [4] * (num_rows == 4)


def test_traces_without_numbers_of_nodes():
    trace = TraceBuilder(**H200).op("aten::mm", 10, 20, id=1).launch("gemm", 12, runs=(30, 40), id=1).step(1, 0, 100)

    with pytest.raises(Unavailable, match="autograd"):
        repeated_backward(case_of(trace))


BEGIN = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0); torch.set_num_threads(1)
grad = torch.autograd.grad
def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
net, other = network(2, 4), network(4, 2)
optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], 1e-3)
for step in range(18):
    x, t = (torch.rand(512, 1, requires_grad=True) for _ in range(2))
    optimizer.zero_grad()
    y = net(torch.cat([x, t], 1))
"""
END = """
    optimizer.step()
"""
PHYSICS = """
    u, v = y[:, :2].split(1, dim=1)
    u_x, u_t = grad(u.sum(), x, create_graph=True)[0], grad(u.sum(), t, create_graph=True)[0]
    v_x, v_t = grad(v.sum(), x, create_graph=True)[0], grad(v.sum(), t, create_graph=True)[0]
    u_xx = grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
    (u_t + u * u_x + v_x * v_t - u_xx).square().mean().backward()
"""
TWO_LOSSES = """
    first, second = other(y)[:, 0].square().mean(), y.abs().mean()
    first.backward(retain_graph=True)
    second.backward()
"""
ROWS = """
    rows = [grad(y[:, i].sum(), x, create_graph=True)[0] for i in range(4)]
    torch.stack(rows).square().mean().backward()
"""
INNOCENT = """
    y_x, y_t = grad(y.sum(), (x, t), create_graph=True)
    (y_x.norm() + grad(y_t.sum(), t, create_graph=True)[0].norm()).backward()
    for _ in range(2):
        net(torch.rand(64, 2)).square().mean().backward()
    h = checkpoint(net, torch.rand(64, 2, requires_grad=True), use_reentrant={is_even})
    for _ in range(3):
        h = net(other(h))
    h.mean().backward()
    fake = net(torch.rand(64, 2))
    other(fake.detach()).mean().backward()
    other.zero_grad()
    other(fake).mean().backward()
"""
APART = """
    apart = []
    for loss in (y.square().mean(), y.abs().mean(), y.exp().mean()):
        net.zero_grad(set_to_none={is_even})
        loss.backward(retain_graph=True)
        apart.append([p.grad.clone() for p in net.parameters()])
    for p, *grads in zip(net.parameters(), *apart):
        p.grad = torch.stack(grads).sum(0)
"""
SEQUENCE = """
    flat = torch.cat([one.reshape(-1) for one in grad(y.square().mean(), list(net.parameters()), create_graph=True)])
    p = flat.detach()
    for _ in range(5):
        p = torch.cat([one.reshape(-1) for one in grad(flat, list(net.parameters()), p, retain_graph=True)])
        p = p / p.norm()
    flat.norm().backward()
"""
DIVERGENCE = """
    u, v = y[:, :2].split(1, dim=1)
    u_x = grad(u, x, torch.ones_like(u), create_graph=True)[0]
    v_t = grad(v, t, torch.ones_like(v), create_graph=True)[0]
    (u_x + v_t).square().mean().backward()
"""


@pytest.fixture
def any_saving(monkeypatch) -> None:
    """However busy the machine is: times are those of the traces above."""
    monkeypatch.setattr(Case, "is_worth", lambda _, saving_ns: saving_ns > 0)


def recorded(forks, folder: Path, body: str) -> Case:
    return run_script(forks, folder, BEGIN + body + END, "--warmup", "4", "--clean", "3", "--trace", "2")


@pytest.mark.parametrize(
    "body, num_passes, num_needed, sentence",
    [
        (PHYSICS, 4, 2, "4 backward passes per step begin at only 2 outputs"),
        (TWO_LOSSES, 2, 1, "2 backward passes per step go through the same forward"),
    ],
)
def test_scripts_that_run_passes_again(forks, tmp_path, any_saving, body, num_passes, num_needed, sentence):
    case = recorded(forks, tmp_path, body)

    (finding,) = repeated_backward(case)

    found = found_in(case)
    (repeats,) = (one for one in (found.same, found.summed) if one.gone)
    assert len(repeats.passes) == num_passes * case.num_steps and repeats.num_needed == num_needed * case.num_steps
    assert finding.sentence.startswith(sentence) and "train.py:" in finding.sentence
    assert finding.saving_ns < 0.7 * case.step_ns


def test_a_script_that_makes_each_row_of_a_jacobian(forks, tmp_path, any_saving):
    case = recorded(forks, tmp_path, ROWS)

    (finding,) = repeated_backward(case)

    assert finding.sentence.startswith("4 backward passes per step run the same nodes") and finding.upper_bound
    assert found_in(case).rows and not found_in(case).same.gone


@parametrized("body", [INNOCENT, APART, SEQUENCE, DIVERGENCE], quick=2)
def test_scripts_with_passes_that_are_needed(forks, tmp_path, any_saving, body):
    case = recorded(forks, tmp_path, body.replace("{is_even}", "step % 2 == 0"))

    found = found_in(case)

    assert not found.same.gone and not found.summed.gone and not found.rows
    assert repeated_backward(case) == []
