"""The loop tells optimizers apart by the parameters they change."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.recorder.clock import Clock  # noqa: E402  it needs torch, which may be missing
from stepscope.recorder.loop import Loop  # noqa: E402


def test_a_new_optimizer_for_the_same_parameters_is_the_same_and_a_reused_id_is_not():
    loop = Loop(Clock(), lambda boundary: None)
    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    first, second, third = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    known = loop._owner(first)

    assert loop._owner(torch.optim.Adam(models[0].parameters())) == known
    # As if the first model had been released, and the second had got its address.
    loop._owners[id(models[1].weight)] = loop._owners.pop(id(models[0].weight))
    assert len({known, loop._owner(second), loop._owner(third)}) == 3
