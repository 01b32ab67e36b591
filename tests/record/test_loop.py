"""Which modules and optimizers make up a loop."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.recorder.session import Session
from stepscope.recorder.step_ends import Owners
from stepscope.recorder.windows import Windows


def test_a_new_optimizer_for_the_same_parameters_is_the_same_and_a_reused_id_is_not():
    owners = Owners()
    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    first, second, third = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    known = owners.number(first)

    assert owners.number(torch.optim.Adam(models[0].parameters())) == known
    # As if the first model had been released, and the second had got its address.
    keys = [(id(model.weight), id(model.bias)) for model in models]
    owners._numbers[keys[1]] = owners._numbers.pop(keys[0])
    assert len({known, owners.number(second), owners.number(third)}) == 3


def test_an_optimizer_for_the_parameters_of_two_others_is_a_third():
    owners = Owners()
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    parameters = [list(model.parameters()) for model in models]

    optimizers = [torch.optim.SGD(some, lr=0.1) for some in (*parameters, parameters[0] + parameters[1])]

    assert [owners.number(one) for one in optimizers] == [0, 1, 2]


def test_a_transform_of_the_data_that_is_a_module_is_no_model(tmp_path):
    transform, model = torch.nn.Flatten(), torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(tmp_path, windows=Windows(warmup=2, clean=3, trace=0, memory=0), facts={})
    session.start()
    for _ in range(8):
        batch = torch.stack([transform(torch.zeros(1, 2, 4))[0] for _ in range(4)])
        model(batch).mean().backward()
        optimizer.step()
    session.close("finished")

    text = (tmp_path / "samples.jsonl").read_text()
    assert "restart" not in text and "lead" not in text
    assert text.count('"num_samples": 4,') == 8
