"""Loops that are not what they seem at first, and scripts that do odd things to what we stand on."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.long

EVALUATES_FIRST = """
from tiny import *
with torch.no_grad():
    for _ in range(40):
        model(batch())
for _ in range(14):
    train_step()
"""

CELL = """
import torch
from torch import nn
cell = nn.LSTMCell(4, 8)
head = nn.Linear(8, 1)
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
for _ in range(14):
    h = c = torch.zeros(3, 8)
    for x in torch.randn(5, 3, 4):
        h, c = cell(x, (h, c))
    head(h).sum().backward()
    optimizer.step()
"""

LSTM = """
import torch
from torch import nn
lstm, head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 1)
optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], lr=0.1)
for _ in range(14):
    head(lstm(torch.randn(4, 10, 16))[0]).sum().backward()
    optimizer.step()
"""

CLOSES_STDERR = "import sys\nsys.stderr.close()\nfrom tiny import *\nfor _ in range(14):\n    train_step()\n"

REPLACES_CALL = """
from tiny import *
num_calls, original = 0, nn.Module.__call__
def call(self, *args, **kwargs):
    global num_calls
    num_calls += 1
    return original(self, *args, **kwargs)
nn.Module.__call__ = call
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(14):
    train_step()
print(num_calls > 0, nn.Module.__call__ is call)
"""

REPLICATES = """
from tiny import *
for _ in range(3):
    train_step()
other = model._replicate_for_data_parallel()
other.forward = lambda *args: "the replica"
print(other(batch()))
for _ in range(11):
    train_step()
"""

EXPORTS = """
from tiny import *
for _ in range(14):
    train_step()
    torch.export.export(nn.Linear(3, 3), (torch.ones(2, 3),))
print("exported")
"""

EXPLICIT = """
import stepscope
from tiny import *
for _ in range(14):
    train_step()
    stepscope.step()
"""

SCRIPTS = {
    "evaluates first": EVALUATES_FIRST,
    "cell": CELL,
    "lstm": LSTM,
    "closes stderr": CLOSES_STDERR,
    "replaces call": REPLACES_CALL,
    "replicates": REPLICATES,
    "exports": EXPORTS,
    "explicit": EXPLICIT,
}


@pytest.fixture(scope="module")
def runs(lab):
    return lab.start(SCRIPTS, {})


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_runs_as_it_would_alone(runs, name):
    assert runs[name].exit_code == 0, runs[name].stderr


def test_a_long_evaluation_before_training_is_not_taken_for_it(runs):
    recording = runs["evaluates first"].recording
    assert recording.facts["steps"]["source"] == "optimizer"
    assert all("backward" in sample.host_ns for sample in recording.window("clean"))
    assert any(entry["phase"] == "backward" for entry in recording.facts["flops"]["by_op"])


def test_a_cell_unrolled_in_time_is_one_micro_batch_and_all_parameters_are_counted(runs):
    recording = runs["cell"].recording
    assert {sample.num_micro_batches for sample in recording.window("clean")} == {1}
    assert {sample.num_samples for sample in recording.window("clean")} == {3}
    assert recording.facts["parameters"]["num_total"] == 4 * 8 * (4 + 8) + 2 * 4 * 8 + 8 + 1


def test_a_product_without_a_formula_makes_the_count_a_lower_bound(runs):
    hidden = runs["lstm"].recording.facts["flops"]["hidden_products"]
    assert any("rnn" in name or "lstm" in name for name in hidden), hidden
    assert not runs["explicit"].recording.facts["flops"]["hidden_products"]


def test_the_scripts_own_replacements_stay(runs):
    assert runs["replaces call"].stdout.startswith("True True\n")
    assert runs["replicates"].stdout.startswith("the replica\n")
    assert runs["exports"].stdout.startswith("exported\n")


def test_the_first_explicit_step_is_whole(runs):
    samples = runs["explicit"].recording.samples
    assert len(samples) == 14
    assert {"forward", "backward", "optimizer"} <= set(samples[0].host_ns)
    assert sum(samples[0].host_ns.values()) == samples[0].wall_ns
    assert samples[0].num_micro_batches == 1
