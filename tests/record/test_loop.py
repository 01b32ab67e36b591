"""Which modules and optimizers make up a loop."""

from __future__ import annotations

import copy
import json
import time
from statistics import median

import pytest

torch = pytest.importorskip("torch")

from stepscope.recorder import between_steps
from stepscope.recorder.history.writer import Writer
from stepscope.recorder.session import Session
from stepscope.recorder.step_ends import Owners
from stepscope.recorder.updates import UpdateWatch
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


@pytest.mark.parametrize("updates_by_hand", [False, pytest.param(True, marks=pytest.mark.long)])
def test_waiting_for_a_disk_that_is_slow_belongs_to_no_step(tmp_path, monkeypatch, updates_by_hand):
    monkeypatch.setattr(Writer, "settle", lambda self: time.sleep(0.2))
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(tmp_path, windows=Windows(warmup=2, clean=5, trace=0, memory=0), facts={})
    session.start()
    for _ in range(9):
        model(torch.ones(4, 8)).mean().backward()
        if updates_by_hand:
            with torch.no_grad():
                model.weight -= 0.1
        else:
            optimizer.step()
    session.close("finished")

    lines = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    steps = [line for line in lines if line.get("window") in ("warmup", "clean")]
    assert len(steps) >= 7 and median(step["wall_ns"] for step in steps) < 0.1e9


def test_the_optimizer_of_a_server_that_averages_its_clients_ends_no_step(tmp_path):
    server = torch.nn.Linear(8, 2)
    outer = torch.optim.SGD(server.parameters(), lr=0.7, momentum=0.9)
    session = Session(tmp_path, windows=Windows(warmup=2, clean=40, trace=0, memory=0), facts={})
    session.start()
    for _ in range(5):
        client = copy.deepcopy(server)
        inner = torch.optim.SGD(client.parameters(), lr=0.1)
        for _ in range(4):
            inner.zero_grad()
            client(torch.ones(6, 8)).mean().backward()
            inner.step()
        for ours, theirs in zip(server.parameters(), client.parameters()):
            ours.grad = ours.data - theirs.data
        outer.step()
    session.close("finished")

    facts = json.loads((tmp_path / "recording.json").read_text())
    text = (tmp_path / "samples.jsonl").read_text()
    assert facts["steps"]["num_steps"] == 20 and "joined" not in text
    assert text.count('"num_samples": 6,') == 20


def test_parameters_whose_memory_is_freed_after_the_backward_are_not_compared():
    """FSDP frees what it has gathered: the leaves of the graph have no values then."""
    weight, bias = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(2))
    watch = UpdateWatch()
    loss = (torch.ones(3, 4) @ weight + bias).sum()
    watch.backward_begins(loss)
    loss.backward()
    bias.untyped_storage().resize_(0)
    watch.backward_ended()

    assert not watch.changed()
    weight.untyped_storage().resize_(0)
    assert not watch._values_differ()


@pytest.mark.parametrize(("num_samples", "what"), [(1, "rollout"), (64, None)])
def test_what_the_trained_model_does_in_each_step_is_no_evaluation(tmp_path, monkeypatch, num_samples, what):
    """It acts on one observation, and the best action is taken; or it labels a batch that is larger."""
    monkeypatch.setattr(between_steps, "script_frames", lambda: iter(()))  # the names of tests tell what they are
    model = torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(tmp_path, windows=Windows(warmup=2, clean=20, trace=0, memory=0), facts={})
    session.start()
    for _ in range(20):
        with torch.no_grad():
            model(torch.ones(num_samples, 8)).argmax(1)
        model(torch.ones(16, 8)).mean().backward()
        optimizer.step()
    session.close("finished")

    lines = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    steps = [line["host_ns"] for line in lines if line.get("step", 0) >= 8 and "host_ns" in line]
    found = [set(step) & {"evaluation", "rollout"} for step in steps]
    assert found and all(each == ({what} if what else set()) for each in found)
