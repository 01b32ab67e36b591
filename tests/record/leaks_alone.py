"""Graphs of earlier steps that are still alive: bytes counted by hand, and the variable that holds them."""

from __future__ import annotations

import gc
import inspect
import linecache
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepscope.recorder.ledger import leaks
from stepscope.recorder.ledger.leaks import find_left_alive
from stepscope.recorder.ledger.nodes import SHOWS_SAVED_TENSORS, next_sequence_number
from stepscope.recorder.model import CallHooks

if not SHOWS_SAVED_TENSORS:
    pytest.skip("this torch does not show saved tensors", allow_module_level=True)

ROWS = 4 * 8 * 4  # bytes of a batch of 4 rows of 8 floats
NUM_STEPS = 4
HERE = "leaks_alone.py"
log: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def _nothing_from_before():
    gc.collect()
    yield
    log.clear()


class Loop:
    """Trains a layer and looks when the last of its steps is over."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)
        self.began = 0

    def begin(self) -> torch.Tensor:
        self.began = next_sequence_number()
        return torch.ones(4, 8)

    def look(self) -> list[dict]:
        entries, held, is_complete = find_left_alive(self.began, list(self.model.parameters()))
        assert is_complete
        assert len({tensor.untyped_storage().data_ptr() for tensor, _ in held}) == len(held)
        for entry in entries:
            mine = [tensor.untyped_storage().nbytes() for tensor, place in held if place == entry["frame"]]
            assert sum(mine) == entry["bytes"]
        return entries


def one(entries: list[dict]) -> dict:
    assert len(entries) == 1, entries
    return entries[0]


def test_a_healthy_loop_leaves_nothing():
    loop = Loop()
    for _ in range(NUM_STEPS):
        x = loop.begin()
        out = loop.model(x)
        loss = out.pow(2).sum()
        loss.backward()

    assert loop.look() == []
    assert loss.grad_fn is not None and out.grad_fn is not None  # the last step's variables are still there


def test_losses_in_a_list_are_named_with_the_lists_variable():
    loop = Loop()
    losses = []
    for _ in range(NUM_STEPS):
        loss = loop.model(loop.begin()).pow(2).sum()
        loss.backward()
        losses.append(loss)
    entry = one(loop.look())

    # Backward has freed the graphs: the earlier losses themselves are left, and the nodes.
    # By the line that fills it, whichever runs now.
    line = inspect.currentframe().f_code.co_firstlineno + 6
    assert linecache.getline(__file__, line).strip() == "losses.append(loss)"
    assert entry["frame"] == f"{HERE}:{line} losses"
    assert (entry["bytes"], entry["num_tensors"], entry["op"]) == (4 * (NUM_STEPS - 1), NUM_STEPS - 1, "SumBackward0")


def test_graphs_that_no_backward_freed_count_what_they_have_saved():
    loop = Loop()
    history = SimpleNamespace(log={"validation": []})
    for _ in range(NUM_STEPS):
        loop.model(loop.begin()).sum().backward()
        history.log["validation"].append(loop.model(torch.ones(4, 8)).pow(2).sum())
    entry = one(loop.look())

    # Each keeps the layer's input and the power's, the last step's too; the scalars of earlier steps come on top.
    assert entry["bytes"] == NUM_STEPS * 2 * ROWS + (NUM_STEPS - 1) * 4
    assert entry["num_tensors"] == NUM_STEPS and entry["frame"].endswith(" history.log")


def test_what_is_on_its_way_to_the_caller_is_no_leak():
    loop = Loop()
    found: list[list[dict]] = []
    handle = CallHooks(loop.model, lambda *_: None, lambda _model: found.append(loop.look()))
    for _ in range(NUM_STEPS):
        loop.model(loop.begin()).argmax(-1)
    handle.remove()

    assert found == [[]] * NUM_STEPS


def test_a_sum_that_grows_hangs_on_to_every_step_before():
    loop = Loop()
    total = 0.0
    for _ in range(NUM_STEPS):
        loss = loop.model(loop.begin()).sum()
        loss.backward()
        total = total + loss
    entry = one(loop.look())

    assert entry["frame"].endswith(" total") and (entry["num_tensors"], entry["op"]) == (1, "AddBackward0")


def test_globals_modules_and_unfound_holders():
    loop = Loop()
    loop.model.child = nn.Module()
    loop.model.child.state = loop.model(loop.begin()).pow(2)  # 2 · ROWS saved, ROWS its own
    log.append(loop.model(torch.ones(4, 8)))  # ROWS saved, ROWS its own
    hidden = iter([loop.model(torch.ones(4, 8)).sum()])  # ROWS saved, 4 its own
    loop.begin()

    found = {entry["frame"]: entry["bytes"] for entry in loop.look()}
    # By the innermost of the variables that lead there: `self` of the method that looks, which does not fill it.
    place = next(frame for frame in found if frame and "model" in frame).split()[0]
    line = inspect.currentframe().f_code.co_firstlineno + 4
    assert found == {f"{place} self.model.child.state": 3 * ROWS, f"{HERE}:{line} log": 2 * ROWS, None: ROWS + 4}
    assert next(hidden).grad_fn is not None


def test_a_checkpointed_graph_is_not_run_again():
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.sin().cos()

    loop = Loop()
    kept = checkpoint(block, loop.model(loop.begin()), use_reentrant=False)
    calls.clear()
    entry = one(loop.look())

    assert calls == [] and kept.grad_fn is not None
    assert entry["bytes"] == 2 * ROWS  # the layer's input, the checkpoint's input


def test_looking_keeps_nothing_alive_and_leaves_locals_alone():
    loop = Loop()
    x = loop.begin()
    mine = locals()
    names = set(mine)

    def inner() -> None:
        aux = loop.model(x).exp()
        assert one(loop.look())["frame"].endswith(" aux")
        reference = weakref.ref(aux)
        del aux
        assert reference() is None  # though looking at a frame's variables made a copy of them

    inner()
    assert set(mine) >= names  # a dict that the script took is not emptied
    assert sys.getrefcount(x) < 10


def test_the_search_ends_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(leaks, "TIME_LIMIT_S", -1.0)
    loop = Loop()
    kept = loop.model(loop.begin()).exp()

    assert not find_left_alive(loop.began, []).is_complete and kept.grad_fn is not None
