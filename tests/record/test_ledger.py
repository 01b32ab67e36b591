"""The ledger's memory: owners and exact bytes, births and deaths, on models small enough to count by hand."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.recorder.ledger import storages
from stepscope.recorder.ledger.ledger import Ledger

FLOAT = 4


class Loop:
    """One training step under the ledger, with the phases a session would report."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.phase: str | None = None
        self.model, self.optimizer = model, optimizer
        self.ledger = Ledger([model], [optimizer] if optimizer else [], lambda: self.phase)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.ledger.start()
        try:
            self.ledger.note_inputs((x,), {})
            self.phase = "forward"
            loss = self.model(x).sum()
            self.phase = "backward"
            self.ledger.backward_begins()
            loss.backward()
            if self.optimizer is not None:
                self.phase = "optimizer"
                self.ledger.note_gradients(self.optimizer)
                self.optimizer.step()
            return loss.detach()
        finally:
            self.ledger.stop()

    def bytes_by_owner(self, phase: str | None = ...) -> dict[str, int]:
        owners: dict[str, int] = {}
        for entry in self.ledger.memory()["allocations"]:
            if phase is ... or entry["phase"] == phase:
                owners[entry["owner"]] = owners.get(entry["owner"], 0) + entry["bytes"]
        return owners

    def entries(self, owner: str) -> list[dict]:
        return [entry for entry in self.ledger.memory()["allocations"] if entry["owner"] == owner]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))


def test_every_byte_of_a_small_step_has_its_owner():
    model = mlp()
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loop.step(torch.ones(5, 4))
    owners = loop.bytes_by_owner()

    weights = (4 * 3 + 3 * 2) * FLOAT
    assert owners["parameter"] == weights
    assert owners["gradient"] == weights
    assert owners["optimizer_state"] == weights
    assert owners["input"] == 5 * 4 * FLOAT
    # Kept for backward: what the ReLU made, and the loss itself.
    assert sorted(entry["shape"] for entry in loop.entries("activation")) == [[], [5, 3]]
    assert owners["activation"] == (5 * 3 + 1) * FLOAT


def test_parameters_gradients_and_buffers_from_before_belong_to_the_modules_that_have_them():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model(torch.ones(2, 4)).sum().backward()
    loop = Loop(model)
    loop.step(torch.ones(2, 4))

    parameters = sorted((e["module"], e["bytes"]) for e in loop.entries("parameter"))
    assert parameters == [("0", 12), ("0", 48), ("1", 12), ("1", 12)]
    assert {e["module"] for e in loop.entries("gradient")} == {"0", "1"}
    assert sorted((e["module"], e["bytes"]) for e in loop.entries("buffer")) == [("1", 8), ("1", 12), ("1", 12)]
    before = [e for e in loop.ledger.memory()["allocations"] if e["op"] == "before the window"]
    assert all(entry["born_ns"] is None and entry["phase"] is None for entry in before)


def test_tied_weights_are_one_storage():
    model = mlp()
    model[2] = nn.Linear(3, 4, bias=False)
    model[2].weight = nn.Parameter(model[0].weight.data.t())  # another parameter, the same bytes
    loop = Loop(model)
    loop.step(torch.ones(5, 4))

    assert loop.bytes_by_owner()["parameter"] == 4 * 3 * FLOAT


def test_adams_state_is_there_before_and_found_when_it_is_born():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    first, second = Loop(model, optimizer), Loop(model, optimizer)
    first.step(torch.ones(5, 4))
    second.step(torch.ones(5, 4))

    state = 2 * (4 * 3 + 3 * 2) * FLOAT + 2 * FLOAT  # two moments, and a step count for each weight
    assert first.bytes_by_owner()["optimizer_state"] == second.bytes_by_owner()["optimizer_state"] == state
    assert all(entry["born_ns"] is None for entry in second.entries("optimizer_state"))


@pytest.mark.parametrize("cache", [True, False])
def test_autocasts_copies_of_the_weights_are_told_apart(cache):
    model = mlp()
    loop = Loop(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        loop.step(torch.ones(5, 4))

    casts = loop.entries("autocast_weight_cast")
    assert sorted((e["shape"], e["bytes"]) for e in casts) == [([2, 3], 2 * 6), ([3, 4], 2 * 12)]
    assert {(e["dtype"], e["phase"]) for e in casts} == {("bfloat16", "forward")}
    flops = loop.ledger.flops(compiled=False)
    assert set(flops["model_flops_by_dtype"]) == {"bf16"}
    # The casts stand for their weights: each weight has the FLOPs of its own products.
    assert [w["forward_flops"] for w in flops["weights"]] == [2 * 5 * 4 * 3, 2 * 5 * 3 * 2]


def test_an_allocation_knows_its_op_phase_and_module():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x) * 2

    loop = Loop(Named())
    loop.step(torch.ones(5, 4))
    made = {(e["op"], e["phase"], e["module"]) for e in loop.ledger.memory()["allocations"]}

    assert ("aten.mm", "forward", "block.0") in made
    assert ("aten.relu", "forward", "block.1") in made
    assert ("aten.mul", "forward", "") in made
    assert any(phase == "backward" for _, phase, _ in made)


def test_births_and_deaths_are_in_order_and_what_lives_on_has_no_death():
    loop = Loop(mlp())
    kept = []
    loop.ledger.start()
    loop.phase = "forward"
    gone = torch.ones(3) * 2
    kept.append(torch.ones(5) * 2)
    del gone
    loop.ledger.stop()
    made = {tuple(e["shape"]): e for e in loop.ledger.memory()["allocations"] if e["op"] == "aten.mul"}

    assert 0 <= made[3,]["born_ns"] <= made[3,]["died_ns"]
    assert made[5,]["died_ns"] is None and made[5,]["born_ns"] >= made[3,]["born_ns"]
    assert made[3,]["owner"] == made[5,]["owner"] == "temporary"


def test_views_and_in_place_ops_allocate_nothing():
    loop = Loop(mlp())
    loop.ledger.start()
    x = torch.empty(6)
    x.view(2, 3).t().add_(1).mul_(2)
    x[1:3].zero_()
    loop.ledger.stop()

    new = [e for e in loop.ledger.memory()["allocations"] if e["op"] != "before the window"]
    assert [(e["op"], e["bytes"]) for e in new] == [("aten.empty", 24)]


def test_a_storage_that_takes_a_dead_ones_place_is_a_new_allocation():
    loop = Loop(mlp())
    loop.ledger.start()
    for _ in range(10):
        torch.ones(1000).mul(2)
    loop.ledger.stop()

    muls = [e for e in loop.ledger.memory()["allocations"] if e["op"] == "aten.mul"]
    assert len(muls) == 10 and all(e["died_ns"] is not None for e in muls)


class CollectsGarbage(dict):
    """An entry that runs the garbage collector when it is written: Python 3.12 may do so between any two lines."""

    def __setitem__(self, key: str, value: object) -> None:
        gc.collect()
        super().__setitem__(key, value)


@pytest.mark.long
def test_a_storage_may_die_while_the_ledger_looks_through_the_living():
    loop = Loop(mlp())
    loop.ledger.start()
    loop.phase = "forward"
    kept = [torch.ones(2) * 2 for _ in range(5)]
    cycle: list[object] = [torch.ones(3) * 2]
    cycle.append(cycle)
    allocations = loop.ledger.memory()["allocations"]
    allocations[:] = [CollectsGarbage(entry) for entry in allocations]
    gc.disable()
    try:
        del cycle
        loop.ledger.backward_begins()
    finally:
        gc.enable()
        loop.ledger.stop()

    assert len(kept) == 5
    made = [e for e in loop.ledger.memory()["allocations"] if e["op"] == "aten.mul"]
    assert [e["owner"] for e in made[:5]] == ["activation"] * 5 and made[5]["died_ns"] is not None


def test_past_the_limit_allocations_are_counted_and_not_kept(monkeypatch):
    monkeypatch.setattr(storages, "MAX_ALLOCATIONS", 5)
    loop = Loop(mlp())
    loop.ledger.start()
    kept = [torch.ones(1) for _ in range(9)]
    loop.ledger.stop()

    memory = loop.ledger.memory()
    assert len(kept) == 9 and len(memory["allocations"]) == 5
    assert memory["num_dropped"] == 9 + 2 - 5  # two parameters were there before


def test_embeddings_are_looked_up_and_linear_weights_are_multiplied():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3, bias=False))
    loop = Loop(model)
    loop.step(torch.tensor([[1, 2, 3]]))
    embedding, linear = loop.ledger.flops(compiled=False)["weights"]

    assert embedding == {"num_elements": 40, "forward_flops": 0, "looked_up": True, "used": True}
    assert linear == {"num_elements": 12, "forward_flops": 2 * 3 * 4 * 3, "looked_up": False, "used": True}


def test_the_model_is_left_as_it_was():
    model = mlp()
    before = [dict(module.__dict__) for module in model.modules()]
    Loop(model).step(torch.ones(5, 4))

    for module, attributes in zip(model.modules(), before):
        assert {**module.__dict__, "_parameters": None} == {**attributes, "_parameters": None}
    assert F.relu(torch.ones(1)).item() == 1.0  # and no mode is left on
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("names", [False, True])
def test_the_ctc_loss_takes_the_path_that_it_takes_without_a_ledger(names):
    """Under a mode, torch passes lengths on as tensors, and on a GPU refuses those on the host."""
    seen = []

    class Script(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    scores = torch.randn(20, 2, 5, requires_grad=True)
    given = {"targets": torch.randint(1, 5, (2, 4))}
    given |= {"input_lengths": torch.tensor([20, 18]), "target_lengths": torch.tensor([4, 3])}

    def loss():
        log_probs = scores.log_softmax(-1)
        return torch.ctc_loss(log_probs, **given).sum() if names else F.ctc_loss(log_probs, *given.values())

    (bare,) = torch.autograd.grad(loss(), scores)
    ledger = Ledger([], [], lambda: None)
    ledger.start()
    with Script():
        (observed,) = torch.autograd.grad(loss(), scores)
    ledger.stop()

    assert torch.equal(bare, observed)
    assert "aten._ctc_loss.default" in seen and "aten._ctc_loss.Tensor" not in seen
