"""What is there before the window: nobody's tensors, data sets, and what earlier steps' graphs keep."""

from __future__ import annotations

import gc
import inspect

import torch
from torch import nn

from stepscope.recorder.clock import Clock
from stepscope.recorder.ledger import memory_window as memory
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.ledger.memory_window import MemoryProbe
from stepscope.recorder.probes import Probes

FLOAT = 4


def test_what_is_changed_in_place_was_there_before():
    average, inner = torch.zeros(50), torch.zeros(60)
    result = torch.empty(70)
    ledger = Ledger([], [], lambda: "forward")
    ledger.start()
    average.mul_(0.9).add_(1.0)
    inner[3:5].fill_(1.0)
    torch.add(torch.ones(70), 1.0, out=result)
    ledger.stop()

    before = {e["bytes"]: e["owner"] for e in ledger.memory()["allocations"] if e["born"] is None}
    assert before == {50 * FLOAT: "other", 60 * FLOAT: "other", 70 * FLOAT: "other"}


def test_owners_that_are_known_come_before_those_that_are_not():
    model = nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]["momentum_buffer"]
    kept, data = torch.ones(7), torch.ones(100, 3)
    ledger = Ledger([model], [optimizer], lambda: "forward")
    ledger.note_before([(kept, "train.py:3 log")], left_alive=True)
    ledger.note_before([(tensor, None) for tensor in (model.weight, model.weight.grad, state, kept, data)])
    ledger.start()
    batch = data[10:14]
    ledger.note_inputs((batch,), {})
    ledger.stop()

    allocations = ledger.memory()["allocations"]
    assert [each["caller"] for each in allocations] == ["train.py:3 log", None, None, None, None]
    found = [(e["owner"], e["shape"], e["bytes"], e["born"]) for e in allocations]
    assert found == [
        ("left_alive", [7], 28, None),
        ("parameter", [5, 3], 60, None),
        ("gradient", [5, 3], 60, None),
        ("optimizer_state", [5, 3], 60, None),
        # All of the data is in memory; the shape is the batch's, which sizes are explained by.
        ("input", [4, 3], 1200, None),
    ]


def test_gradients_of_a_backward_inside_the_optimizer_are_gradients():
    model = nn.Linear(3, 5)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    phase = ["optimizer"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).pow(2).sum()
        phase[0] = "backward"
        loss.backward()
        phase[0] = "optimizer"
        return loss

    ledger = Ledger([model], [optimizer], lambda: phase[0])
    ledger.start()
    ledger.note_gradients(optimizer)  # when it begins there are none
    optimizer.step(closure)
    optimizer.zero_grad()
    ledger.stop()

    gradients = [e for e in ledger.memory()["allocations"] if e["owner"] == "gradient"]
    assert sorted(e["bytes"] for e in gradients) == [5 * FLOAT, 3 * 5 * FLOAT]
    assert all(e["died"] is not None for e in gradients)


def probe(tmp_path, notes: list[str], in_full: bool = False) -> MemoryProbe:
    def guard(_what, call) -> None:
        call()

    return MemoryProbe(tmp_path, in_full, lambda _about, text: notes.append(text), guard)


def test_every_tensor_of_the_process_is_there_when_the_window_begins(tmp_path):
    gc.collect()
    model, average = nn.Linear(3, 5), torch.zeros(12345)
    window = probe(tmp_path, [])
    window.start([model], [], None, lambda: "forward")
    del average
    ledger = window.stop()

    (entry,) = [e for e in ledger.memory()["allocations"] if e["shape"] == [12345]]
    assert (entry["owner"], entry["bytes"], entry["born"]) == ("other", 12345 * FLOAT, None)
    assert entry["died"] is not None


def test_of_too_many_tensors_the_largest_are_there_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MAX_BEFORE", 2)
    monkeypatch.setattr(memory, "MAX_NAMED", 1)
    tensors = [torch.zeros(num) for num in (1000, 30_000_000, 2000, 30_000_001, 10)]
    notes: list[str] = []
    window = probe(tmp_path, notes, in_full=True)
    window.start([], [], None, lambda: "forward")
    found = window.stop().memory()["allocations"]

    line = inspect.currentframe().f_code.co_firstlineno + 3
    # Graphs that other tests left alive in this process have an owner of their own.
    assert [(each["bytes"], each["caller"]) for each in found if each["owner"] == "other"] == [
        (4 * 30_000_001, f"test_before_window.py:{line} tensors"),
        (4 * 30_000_000, None),
    ]
    assert len(tensors) == 5 and any("smallest tensors" in note for note in notes)


def earlier_step() -> torch.Tensor:
    """A tensor that keeps the graph of an earlier step alive."""
    return (torch.ones(1000, requires_grad=True) * 2.0).exp()


def test_a_window_that_is_dropped_takes_its_notes_along(tmp_path):
    kept, notes = earlier_step(), []
    window = probe(tmp_path, notes)
    window.step_ended()
    window.step_ended()
    window.start([], [], None, lambda: "forward")
    window.drop()
    assert notes == []

    window.start([], [], None, lambda: "forward")
    window.stop()
    assert kept.grad_fn is not None and any("earlier steps' graphs" in note for note in notes)


def test_discarded_steps_take_the_notes_and_files_of_their_windows_along(tmp_path):
    (tmp_path / "trace").mkdir()
    trace, repeated = tmp_path / "trace" / "rank0.json.gz", tmp_path / "trace" / "repeat2.json.gz"
    kept = earlier_step()
    facts = {"trace": {"file": "trace/rank0.json.gz", "repeated": [{"file": "trace/repeat2.json.gz"}]}}
    probes = Probes(tmp_path, Clock(), facts)
    for file in (trace, repeated):
        file.touch()
    probes.memory.step_ended()
    probes.memory.step_ended()
    probes.start_memory([], [])
    probes.stop_memory()
    probes.note("trace", "the trace window was stopped")
    probes.note("counters", "no NVML counters")
    assert kept.grad_fn is not None and [note["about"] for note in facts["notes"]] == ["memory", "trace", "counters"]

    probes.forget_windows()

    assert facts == {"notes": [{"about": "counters", "text": "no NVML counters"}]}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_formula_that_fails_costs_no_bytes(monkeypatch):
    from stepscope.recorder.ledger import flops

    def fails(*_):
        raise TypeError("another signature")

    monkeypatch.setattr(flops, "count_flops", fails)
    model = nn.Linear(3, 5)
    ledger = Ledger([model], [], lambda: "forward")
    ledger.start()
    out = model(torch.ones(2, 3))
    ledger.stop()

    assert out.shape in [torch.Size(e["shape"]) for e in ledger.memory()["allocations"]]
    assert "another signature" in ledger.flops(compiled=False)["error"]
