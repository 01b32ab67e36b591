"""A whole step under the ledger: recomputation told apart, results unchanged, faults survived."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from stepscope.analysis.costs.flops import step_flops
from stepscope.recorder.ledger.ledger import Ledger

BATCH, WIDTH = 4, 8
LAYER = 2 * BATCH * WIDTH * WIDTH


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


def model_of(how: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Block(how), Block(how))


def step(model: nn.Module, x: torch.Tensor, watched: bool = True) -> tuple[dict, list[torch.Tensor]]:
    """FLOPs of one forward and backward, and everything it computed."""
    phase = ["forward"]
    ledger = Ledger([model], [], lambda: phase[0])
    torch.manual_seed(2)
    if watched:
        ledger.start()
    out = model(x)
    phase[0] = "backward"
    ledger.backward_begins()
    out.sum().backward()
    ledger.stop()
    results = [out.detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]
    return ledger.flops(compiled=False), results


def total(facts: dict, recomputed: bool, phase: str | None = None) -> int:
    entries = [e for e in facts["by_op"] if phase in (None, e["phase"])]
    return sum(entry["flops"] for entry in entries if entry["recomputed"] == recomputed)


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_a_checkpointed_step_differs_in_what_is_recomputed_alone(how):
    x = torch.ones(BATCH, WIDTH, requires_grad=True)
    facts, _ = step(model_of(how), x)

    # Non-reentrant checkpointing stops as soon as it has what it needs; both layers' products are needed.
    assert total(facts, recomputed=True) == (0 if how == "plain" else 2 * LAYER)
    assert total(facts, recomputed=False, phase="forward") == 2 * LAYER
    assert total(facts, recomputed=False, phase="backward") == 4 * LAYER
    assert facts["model_flops_by_dtype"] == {"fp32": 6 * LAYER}
    assert [w["forward_flops"] for w in facts["weights"] if w["num_elements"] > WIDTH] == [LAYER, LAYER]


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_results_gradients_and_random_state_are_bit_for_bit_the_same(how):
    x = torch.ones(BATCH, WIDTH, requires_grad=True)
    _, bare = step(model_of(how), x, watched=False)
    _, watched = step(model_of(how), x)

    assert all(torch.equal(a, b) for a, b in zip(bare, watched)) and len(bare) == len(watched)


def test_a_gradient_of_a_gradient_is_not_recomputation():
    """GIVEN a penalty on the gradient (its backward keeps a graph) THEN its products are the model's own."""
    layer = nn.Linear(WIDTH, 1, bias=False)
    x = torch.ones(BATCH, WIDTH, requires_grad=True)
    out = layer(x).pow(2).sum()
    ledger = Ledger([layer], [], lambda: "backward")
    ledger.start()
    ledger.backward_begins(create_graph=True)
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    ledger.stop()

    facts = ledger.flops(compiled=False)
    assert gradient.shape == x.shape
    assert total(facts, recomputed=True) == 0
    assert facts["model_flops_by_dtype"] == {"fp32": 2 * BATCH * WIDTH}


def test_an_op_whose_formula_raises_is_a_gap_that_is_said_and_not_an_exception(monkeypatch):
    def broken(*_args, **_kwargs):
        raise AssertionError("a shape nobody thought of")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, broken)
    ledger = Ledger([], [], lambda: "forward")
    ledger.start()
    product = torch.ones(2, 3) @ torch.ones(3, 2)
    torch.bmm(torch.ones(1, 2, 3), torch.ones(1, 3, 2))
    ledger.stop()

    facts = ledger.flops(compiled=False)
    assert torch.equal(product, torch.full((2, 2), 3.0))
    assert "aten.mm" in facts["error"] and "a shape nobody thought of" in facts["error"]
    assert facts["model_flops_by_dtype"] == {"fp32": 2 * 2 * 3 * 2}


def test_the_scripts_own_exception_comes_out_as_it_is():
    ledger = Ledger([], [], lambda: "forward")
    ledger.start()
    try:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    finally:
        ledger.stop()

    assert ledger.flops(compiled=False)["error"] is None


class Twice(HigherOrderOperator):
    """A higher-order op, as flex_attention is: Python below, and no rule for modes."""

    def __init__(self) -> None:
        super().__init__("stepscope_test_twice")

    def __call__(self, function, x):
        return super().__call__(function, x)


twice = Twice()
twice.fallthrough(DispatchKey.AutogradCPU)
twice.py_impl(DispatchKey.CompositeExplicitAutograd)(lambda function, x: function(function(x)))


def test_a_higher_order_op_runs_under_the_ledger_as_it_does_without():
    """GIVEN an op that calls Python functions WHEN the ledger looks on THEN it still runs."""
    weight, x = torch.full((2, 2), 0.5), torch.ones(2, 2)
    expected = twice(lambda y: y @ weight, x)
    ledger = Ledger([], [], lambda: "forward")
    ledger.start()
    try:
        found = twice(lambda y: y @ weight, x)
    finally:
        ledger.stop()

    assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_counted_and_unchanged(mode):
    model, x = model_of("plain").eval(), torch.ones(BATCH, WIDTH)
    with mode():
        expected = model(x)
        ledger = Ledger([model], [], lambda: "forward")
        ledger.start()
        found = model(x)
        ledger.stop()

    assert torch.equal(found, expected)
    assert ledger.flops(compiled=False)["model_flops_by_dtype"] == {"fp32": 2 * LAYER}


def test_products_of_two_activations_are_told_from_products_with_weights():
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    ledger = Ledger([layer], [], lambda: "forward")
    ledger.start()
    x = layer(torch.ones(BATCH, WIDTH))
    x @ x.t()
    ledger.stop()

    facts = ledger.flops(compiled=True)
    assert facts["forward_activation_flops"] == 2 * BATCH * BATCH * WIDTH
    weight = {"num_elements": WIDTH * WIDTH, "forward_flops": LAYER, "looked_up": False, "used": True}
    assert facts["weights"] == [weight]
    assert facts["compiled"] is True


class Experts(nn.Module):
    """Four experts, of which every token goes to the first and none to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.experts[0](x) + self.experts[1](x[:0]).sum()  # the others are not called at all


def test_an_expert_that_got_no_token_is_not_active():
    """Active parameters are those a token passes through: an idle expert has none of them."""
    model = Experts()
    ledger = Ledger([model], [], lambda: "forward")
    ledger.start()
    model(torch.ones(BATCH, WIDTH))
    ledger.stop()
    found = step_flops(ledger.flops(compiled=False), None, num_tokens=BATCH)

    assert found.num_active_parameters == 2 * WIDTH + WIDTH * WIDTH  # the norm's two vectors and one expert


def test_time_between_the_phases_is_other():
    ledger = Ledger([], [], lambda: None)
    ledger.start()
    torch.ones(2, 3) @ torch.ones(3, 2)
    ledger.stop()

    assert [entry["phase"] for entry in ledger.flops(compiled=False)["by_op"]] == ["other"]
