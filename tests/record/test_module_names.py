"""Names of modules in the memory tables: where checkpoints, several models and wrappers would change them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.model import CalledRoots, named_modules, plain_name

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        if how == "wrapper":
            self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            again = {"reentrant": True, "not reentrant": False}.get(self.how)
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
        return x


def roots_of(model: nn.Module, calls: list[nn.Module]) -> list[nn.Module]:
    """The modules that are found to be roots when these are called and a backward is run."""
    search = CalledRoots(model.modules())
    for module in calls:
        module(torch.ones(2, WIDTH)).sum().backward()
    search.remove()
    return list(search.found.values())


def step(roots: list[nn.Module], optimizer: torch.optim.Optimizer, forward) -> list[dict]:
    """The allocations of one step."""
    phase = ["forward"]
    ledger = Ledger(roots, [optimizer], lambda: phase[0])
    ledger.start()
    loss = forward(torch.ones(2, WIDTH)).sum()
    phase[0] = "backward"
    ledger.backward_begins(tensors=loss)
    loss.backward()
    phase[0] = "optimizer"
    ledger.note_gradients(optimizer)
    optimizer.step()
    ledger.stop()
    return ledger.memory()["allocations"]


def names_by(allocations: list[dict], *owners: str) -> set[str | None]:
    return {each["module"] for each in allocations if each["owner"] in owners}


CHECKPOINTED = ["reentrant", "not reentrant", "wrapper"]


@pytest.mark.parametrize("how", ["plain", *CHECKPOINTED])
def test_what_a_backward_calls_again_is_no_root(how):
    model = Model(how)

    assert roots_of(model, [model]) == [model]


@pytest.mark.parametrize("how", CHECKPOINTED)
def test_a_checkpoint_changes_no_name(how):
    def names(how: str) -> tuple[set, set]:
        model = Model(how)
        allocations = step(roots_of(model, [model]), torch.optim.Adam(model.parameters()), model)
        weights = names_by(allocations, "parameter", "gradient", "optimizer_state")
        return {each["module"] for each in allocations}, weights

    assert names(how) == names("plain")


def test_parameters_gradients_and_their_state_belong_to_the_module_that_has_them():
    model = Model("plain")
    allocations = step([model], torch.optim.Adam(model.parameters()), model)

    holders = {"first"} | {f"blocks.{i}{name}" for i in (0, 1) for name in ("", ".up", ".down")}
    for owner in ("parameter", "gradient", "optimizer_state"):
        assert names_by(allocations, owner) == holders
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(each["bytes"] for each in allocations if each["owner"] == "parameter") == model_bytes


def test_several_models_go_by_their_classes_and_a_part_of_one_has_its_place_there():
    model, other, twins = Model("plain"), nn.Linear(WIDTH, WIDTH), [Block(), Block()]

    def names(*roots: nn.Module) -> list[str]:
        return [name for _, _, modules in named_modules(list(roots)) for name, _ in modules]

    assert names(other) == [""]
    assert names(other, twins[0]) == ["Linear", "Block", "Block.up", "Block.down"]
    assert names(*twins)[::3] == ["Block_0", "Block_1"]
    assert names(model.blocks[1], model) == names(model)
    parameters = [*other.parameters(), *twins[0].parameters()]
    allocations = step([other, twins[0]], torch.optim.SGD(parameters, lr=0.1), lambda x: twins[0](other(x)))
    assert names_by(allocations, "gradient") == {"Linear", "Block", "Block.up", "Block.down"}


def test_names_of_wrappers_are_left_out():
    assert plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.up") == "blocks.0.up"
    assert plain_name("_orig_mod") == plain_name("") == ""


def test_parameters_that_no_module_has_are_parameters():
    weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
    allocations = step([], torch.optim.SGD([weight], lr=0.1, momentum=0.9), lambda x: x @ weight)

    sizes = {each["owner"]: each["bytes"] for each in allocations}
    assert sizes["parameter"] == sizes["gradient"] == sizes["optimizer_state"] == weight.nbytes
