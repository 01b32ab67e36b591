"""The log of a step's ops: the line behind each, what it reads and writes, zeros, and what never changes."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.ledger.op_log import Unchanged, _nonzeros
from stepscope.recorder.ledger.storages import storage_key


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(400, 64, bias=False)

    def forward(self, x):
        self.line = sys._getframe().f_lineno + 1
        return self.up(x).tanh()


def logged(step, *modules):
    phase = ["forward"]
    ledger = Ledger(list(modules), [], lambda: phase[0], logs_ops=True)
    ledger.start()
    try:
        step(phase)
    finally:
        ledger.stop()
    return ledger, ledger.log.table([])


def test_a_backward_op_has_the_line_of_its_forward():
    net, x = Net(), torch.randn(8, 400)

    def step(phase):
        out = net(x).sum()
        phase[0] = "backward"
        out.backward()

    ledger, log = logged(step, net)
    kinds = log["kinds"]
    lines = {(kind["op"], kind["phase"]): kind["place"] for kind in kinds}
    here = f"test_op_lines.py:{net.line} forward"

    assert lines["aten.mm", "forward"] == lines["aten.tanh", "forward"] == here
    assert lines["aten.mm", "backward"] == lines["aten.tanh_backward", "backward"] == here
    assert lines["aten.sum", "forward"].endswith(" step"), "the caller of the model, not the model"
    callers = {(kind["op"], kind["phase"]): kind["caller"] for kind in kinds}
    assert callers["aten.mm", "backward"] == callers["aten.tanh", "forward"] == lines["aten.sum", "forward"]
    assert callers["aten.sum", "forward"] is None
    owners = [entry["owner"] for entry in ledger.memory()["allocations"]]
    product = next(call for call in log["calls"] if kinds[call["kind"]]["op"] == "aten.mm")
    assert "parameter" in {owners[index] for index in product["reads"]}
    assert product["size"] == 8 * 400 + 400 * 64


def test_a_fill_of_the_whole_does_not_read_what_was_there_and_one_of_a_part_does():
    x = torch.randn(64)

    def step(phase):
        x.zero_()
        x[:8].fill_(1.0)
        torch._foreach_add_([x], 1.0)

    _, log = logged(step, Net())
    flows = [(call["reads"], call["writes"]) for call in log["calls"]]

    assert flows[0][0] == [] and flows[0][1] == flows[1][1] == flows[2][1]
    assert flows[1][0] == flows[1][1] and flows[2][0] == flows[2][1]


def test_zeros_of_large_operands_are_counted():
    net = Net()
    sparse = torch.zeros(64, 400)
    sparse[:, 3] = 1.0

    _, log = logged(lambda phase: (net.up(sparse), net.up(torch.ones(64, 400))), net)

    (entry,) = log["zeros"]
    assert entry["share"] == pytest.approx(0.9975, abs=1e-4)
    assert entry["storage"] in log["calls"][entry["call"]]["reads"]


@pytest.mark.parametrize("shape", [(1024, 1024), (1000, 1000), (4096, 64), (64, 4096), (7, 96, 512)])
def test_zeros_are_estimated_from_few_elements(shape):
    """Rows, columns and diagonals are where a regular choice of elements finds all of the ones, or none."""
    row, column, diagonal = (torch.zeros(shape) for _ in range(3))
    row[..., 0, :] = column[..., :, 0] = 1.0
    torch.diagonal(diagonal, dim1=-2, dim2=-1).fill_(1.0)

    for matrix in (row, column, diagonal, column.transpose(-1, -2)):
        found = _nonzeros(matrix)
        assert found is not None and found._num < 50_000
        exact = 1.0 - float(torch.count_nonzero(matrix)) / matrix.numel()
        assert found.zero_share == pytest.approx(exact, abs=2e-3)


def test_what_repeats_elements_is_not_counted():
    assert _nonzeros(torch.zeros(1, 600).expand(600, 600)) is None


def test_drawn_numbers_are_marked():
    _, log = logged(lambda phase: (torch.rand(3), torch.zeros(3)), Net())

    assert {kind["op"]: kind["is_random"] for kind in log["kinds"]} == {"aten.rand": True, "aten.zeros": False}


def test_only_what_lives_and_is_not_written_to_is_unchanged():
    same, written, released = (torch.randn(4) for _ in range(3))
    before = Unchanged([same, written, released])
    written[0] = 1.0
    del released
    new = torch.randn(4)

    assert before.keys([same, written, new]) == {storage_key(same)}


def test_a_copy_by_pythons_library_has_the_line_that_asked_for_it():
    net = Net()

    def step(phase):
        copy.deepcopy(net)

    _, log = logged(step, net)

    assert {kind["place"].split()[1] for kind in log["kinds"]} == {"step"}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix_is_followed_by_its_values_and_its_products_are_counted_by_them(layout):
    net, x = nn.Linear(64, 32, bias=False), torch.randn(300, 64)
    dense = torch.zeros(300, 300)
    dense[torch.arange(90), torch.arange(90)] = 1.0  # 90 of 90,000

    def step(phase):
        neighbors = (2 * dense).to_sparse(layout=layout)
        out = (neighbors @ net(x)).sum()
        phase[0] = "backward"
        out.backward()

    ledger, log = logged(step, net)
    flops = {}
    for each in ledger.flops(compiled=False)["by_op"]:
        flops[each["phase"]] = flops.get(each["phase"], 0) + each["flops"]

    assert log["num_dropped"] == 0 and ledger.flops(compiled=False)["error"] is None
    linear, product = 2 * 300 * 64 * 32, 2 * 90 * 32
    assert flops == {"forward": linear + product, "backward": linear + product}
    made = {write: number for number, call in enumerate(log["calls"]) for write in call["writes"]}
    names = [log["kinds"][call["kind"]]["op"] for call in log["calls"]]
    products = [call for call, name in zip(log["calls"], names) if name in ("aten.mm", "aten.addmm")]
    of_sparse = products[1]  # after the layer's
    sources = {names[made[read]] for read in of_sparse["reads"] if read in made}
    assert any("sparse" in name for name in sources), "its values are known by the op that made them"


def test_an_op_that_cannot_be_followed_makes_the_log_incomplete(monkeypatch):
    from stepscope.analysis.structure.op_log import logged_calls
    from stepscope.recorder.ledger.op_log import OpLog

    def broken(self, tensor):
        raise RuntimeError("no storage")

    monkeypatch.setattr(OpLog, "_nonzeros", broken)
    net = Net()
    ledger, log = logged(lambda phase: net(torch.randn(64, 400)), net)
    assert log["num_dropped"] == 1
    assert logged_calls({**ledger.memory(), "ops": log}).is_empty()
