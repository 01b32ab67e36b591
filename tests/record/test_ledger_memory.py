"""The ledger's memory tables: modules of the backward, callers, stages, and what is saved for backward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepscope.recorder.ledger import nodes
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.ledger.storages import Storages, storage_key

FLOAT, BATCH, WIDTH = 4, 4, 8
ROWS = BATCH * WIDTH * FLOAT  # bytes of one activation

shows_saved = pytest.mark.skipif(not nodes.SHOWS_SAVED_TENSORS, reason="this torch does not show saved tensors")


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).sum()


def step(model: nn.Module, micro_batches: tuple[int, ...] = (BATCH,), callers: bool = False) -> dict:
    """The memory tables of one training step of `model`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phase: list[str | None] = [None]
    ledger = Ledger([model], [optimizer], lambda: phase[0], callers=callers)
    ledger.start()
    for size in micro_batches:
        x = torch.ones(size, WIDTH, requires_grad=True)
        ledger.note_inputs((x,), {})
        phase[0] = "forward"
        loss = loss_of(model(x))
        phase[0] = "backward"
        ledger.backward_begins(tensors=loss)
        loss.backward()
    phase[0] = "optimizer"
    ledger.note_gradients(optimizer)
    optimizer.step()
    ledger.stop()
    memory = ledger.memory()
    assert ledger.saved_error is None
    return memory


def model_of(how: str) -> nn.Module:
    return nn.Sequential(Block(how), Block(how))


def modules_of(memory: dict, phase: str, op: str) -> list[str | None]:
    return [e["module"] for e in memory["allocations"] if (e["phase"], e["op"]) == (phase, op)]


def test_the_tables_are_as_the_readers_expect_them():
    memory = step(model_of("plain"))

    assert memory["schema_version"] == 2 and memory["device"] == "cpu" and memory["num_dropped"] == 0
    assert memory["left_alive"] == [] and memory["allocator"] is None
    names = {"bytes", "device", "dtype", "shape", "owner", "op", "phase", "module", "caller"}
    assert all(set(e) == names | {"born", "died", "born_ns", "died_ns"} for e in memory["allocations"])
    assert all(e["caller"] is None for e in memory["allocations"])
    events = [e[key] for e in memory["allocations"] for key in ("born", "died") if e[key] is not None]
    assert sorted(events) == list(range(len(events)))


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_what_the_backward_allocates_belongs_to_the_module_that_made_the_node(how):
    memory = step(model_of(how))
    last, first = ["1.second", "1.first"], ["0.second", "0.first"]

    # Each layer's backward has two products: the gradients of its input and of its weight.
    assert modules_of(memory, "backward", "aten.mm") == [name for name in last + first for _ in range(2)]
    assert modules_of(memory, "backward", "aten.threshold_backward") == ["1", "0"]
    # The loss was made outside of any module.
    assert set(modules_of(memory, "backward", "aten.pow")) == {None}
    recomputed = ["1.first", "1.second", "0.first", "0.second"] if how == "reentrant" else ["1.first", "0.first"]
    assert modules_of(memory, "backward", "aten.addmm") == ([] if how == "plain" else recomputed)


def test_a_gradient_that_is_added_up_belongs_to_its_parameters_module():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.inner.weight.expand(WIDTH, WIDTH).contiguous().sin())

    model = Twice()
    model.inner.weight.register_hook(lambda gradient: gradient.t())  # cannot be taken over as it lies
    memory = step(model)

    # AccumulateGrad makes its own copy. Nobody called `inner`: its parameter says where it belongs.
    assert "inner" in modules_of(memory, "backward", "aten.new_empty_strided") + modules_of(
        memory, "backward", "aten.clone"
    )


def test_without_torchs_private_functions_there_is_no_module_and_no_crash(monkeypatch):
    monkeypatch.setattr(nodes, "current_node", lambda: None)
    monkeypatch.setattr(nodes, "_next_sequence_number", lambda: 0)
    memory = step(model_of("plain"))

    assert modules_of(memory, "backward", "aten.threshold_backward") == [None, None]
    assert set(modules_of(memory, "forward", "aten.addmm")) == {"0.first", "0.second", "1.first", "1.second"}


def test_nodes_of_another_thread_that_cannot_be_told_apart_have_no_module(monkeypatch):
    numbered = nodes.NodeModules()
    marks = {0: ([0, 10], ["home", None]), 1: ([5, 8], ["recomputed", "home"])}
    numbered._home, numbered._marks = 0, marks
    monkeypatch.setattr(nodes, "_next_sequence_number", lambda: 9)

    def of(number: int, thread: int) -> str | None:
        monkeypatch.setattr(nodes.threading, "get_ident", lambda: thread)
        return numbered.of(type("Node", (), {"_sequence_nr": lambda _self: number})())

    assert [of(number, thread=0) for number in (3, 6, 12)] == ["home", "home", None]
    assert [of(number, thread=1) for number in (3, 6, 8, 12)] == ["home", None, "home", None]


def test_callers_are_lines_of_the_script_and_neither_torchs_nor_ours():
    memory = step(model_of("plain"), callers=True)
    callers = {(e["phase"], e["op"]): e["caller"] for e in memory["allocations"] if e["born"] is not None}
    line = Block.inner.__code__.co_firstlineno + 1

    assert callers["forward", "aten.addmm"] == f"test_ledger_memory.py:{line} inner"
    assert callers["forward", "aten.pow"] == f"test_ledger_memory.py:{loss_of.__code__.co_firstlineno + 1} loss_of"
    assert callers["backward", "aten.mm"].startswith("test_ledger_memory.py:")
    assert callers["backward", "aten.mm"].endswith(" step")
    assert all(e["caller"] is None for e in memory["allocations"] if e["born"] is None)


def test_stages_begin_where_the_phase_changes_and_the_loss_follows_the_root():
    memory = step(model_of("plain"), micro_batches=(BATCH, BATCH))
    names = [stage["name"] for stage in memory["stages"]]
    starts = [stage["event"] for stage in memory["stages"]]

    a_micro_batch = ["forward", "loss", "backward"]
    assert names == ["other", *a_micro_batch, *a_micro_batch, "optimizer"]
    assert starts == sorted(starts) and starts[0] == 0
    for stage, begin, end in zip(names[1:-1], starts[1:-1], starts[2:]):
        phases = {e["phase"] for e in memory["allocations"] if e["born"] is not None and begin <= e["born"] < end}
        # The second batch was made before anybody said that the backward was over.
        assert phases <= {"forward" if stage == "loss" else stage, None}
    first_loss = next(e for e in memory["allocations"] if (e["phase"], e["op"]) == ("forward", "aten.pow"))
    assert first_loss["born"] == starts[2]


def test_between_two_roots_of_one_forward_it_is_not_the_loss_yet():
    roots = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    phase = ["forward"]
    ledger = Ledger(roots, [], lambda: phase[0])
    ledger.start()
    loss = roots[1](roots[0](torch.ones(BATCH, WIDTH)).relu()).sum()
    phase[0] = "backward"
    loss.backward()
    ledger.stop()

    assert [stage["name"] for stage in ledger.memory()["stages"]] == ["forward", "loss", "backward"]


@shows_saved
@pytest.mark.parametrize(
    ("how", "saved"),
    [
        # A layer keeps its input, the power its own; the ReLU's result is the second layer's input.
        ("plain", {None: ROWS, "0.first": ROWS, "0.second": ROWS, "1.first": ROWS, "1.second": ROWS}),
        ("reentrant", {None: ROWS, "0": ROWS, "1": ROWS}),
        ("not reentrant", {None: ROWS, "0": ROWS, "1": ROWS}),
    ],
)
def test_bytes_saved_for_backward_by_module_without_parameters_each_storage_once(how, saved):
    for micro_batches in ((BATCH,), (1, BATCH, 2)):  # a second micro-batch saves again when the first is gone
        memory = step(model_of(how), micro_batches)

        assert {entry["module"]: entry["bytes"] for entry in memory["saved"]} == saved
        assert all(entry["num_tensors"] == 1 for entry in memory["saved"])


@shows_saved
def test_looking_at_what_is_saved_runs_no_hook_and_keeps_nothing_alive():
    unpacked = []
    weight, x = torch.ones(WIDTH, WIDTH, requires_grad=True), torch.ones(BATCH, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: unpacked.append(t) or t):
        out = (x @ weight).sin()
    kept = (x * 2) @ weight
    reference = weakref.ref(kept.grad_fn._raw_saved_self.data.untyped_storage())
    ledger = Ledger([], [], lambda: "forward")
    ledger.backward_begins(tensors=[out, kept])
    del kept
    gc.collect()

    assert unpacked == [] and reference() is None
    assert ledger.memory()["saved"] == [{"module": None, "bytes": 3 * ROWS, "num_tensors": 3}]


def test_a_graph_nobody_thought_of_is_a_gap_and_not_a_crash(monkeypatch):
    def broken(*_args, **_kwargs):
        raise TypeError("not a node")

    monkeypatch.setattr("stepscope.recorder.ledger.ledger.saved_bytes", broken)
    ledger = Ledger([], [], lambda: None)
    ledger.backward_begins(tensors=torch.ones(1, requires_grad=True) * 2)

    assert ledger.saved_error == "TypeError: not a node" and ledger.memory()["saved"] == []


class Wrapper(torch.Tensor):
    """Stands for another tensor, as a plan's tensors do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device="cpu")
        wrapper._stepscope_inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nobody computes here")


def test_a_tensor_that_stands_for_another_is_known_by_the_others_storage():
    inner = torch.ones(3, device="meta")
    wrapper = Wrapper(inner)
    storages = Storages(lambda: "other")
    storages.open()
    storages.own([wrapper, inner], "input", "outside an op")
    del wrapper, inner

    assert [(e["bytes"], e["born"], e["died"]) for e in storages.allocations] == [(12, 0, 1)]
    assert storage_key(torch.ones(0)) is None


def test_ledgers_may_share_storages_that_outlive_them():
    storages = Storages(lambda: "build")
    storages.open()
    builder = Ledger([], [], lambda: "build", storages=storages)
    builder.start()
    model = nn.Linear(2, 2, bias=False)
    builder.stop()
    index = storages.took(100, "aten.mm", "workspace", "build", "cuda:0")
    second = Ledger([model], [], lambda: "forward", storages=storages)
    second.start()
    model(torch.ones(1, 2))
    second.stop()
    storages.gave_back(index)
    weight, workspace = (next(e for e in storages.allocations if e["owner"] == o) for o in ("parameter", "workspace"))

    assert (weight["module"], weight["op"], weight["born"], weight["died"]) == ("", "aten.empty", 0, None)
    assert workspace["died"] == storages.num_events - 1
    assert [stage["name"] for stage in second.memory()["stages"]][:2] == ["build", "forward"]


def test_a_view_of_a_storage_from_before_is_no_birth_and_what_dies_after_lives_on():
    data, index = torch.arange(10.0), slice(2, 5)
    ledger = Ledger([], [], lambda: "forward")
    ledger.start()
    view, made = data[index], data * 2
    ledger.stop()
    del data, view, made
    before, born = ledger.memory()["allocations"]

    assert (before["bytes"], before["born"], before["died"], before["phase"]) == (40, None, None, None)
    assert (born["op"], born["born"], born["died"]) == ("aten.mul", 0, None)
