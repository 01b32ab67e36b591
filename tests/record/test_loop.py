"""Optimizers are told apart by the parameters they change."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.recorder.step_ends import Owners  # noqa: E402  it needs torch, which may be missing


def test_a_new_optimizer_for_the_same_parameters_is_the_same_and_a_reused_id_is_not():
    owners = Owners()
    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    first, second, third = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    known = owners.number(first)

    assert owners.number(torch.optim.Adam(models[0].parameters())) == known
    # As if the first model had been released, and the second had got its address.
    owners._numbers[id(models[1].weight)] = owners._numbers.pop(id(models[0].weight))
    assert len({known, owners.number(second), owners.number(third)}) == 3
