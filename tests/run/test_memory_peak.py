"""`stepscope run --memory` on scripts whose peak is known: a leak, last step's results, a checkpoint."""

from __future__ import annotations

import gzip
import json

import pytest

from stepscope.document.sections.memory import memory_document
from stepscope.recorder import files
from stepscope.recorder.ledger.nodes import SHOWS_SAVED_TENSORS
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.memory_scaling import analyze_memory

SHORT = ("--warmup", "2", "--clean", "2", "--trace", "0", "--memory")
NUM_STEPS_BEFORE = 4

LEAK = """
from tiny import *

def train():
    evaluated = []
    for _ in range(9):
        tokens = batch()
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluated.append(loss_of(model, tokens))

train()
"""

RESULT = """
from tiny import *
import copy

average = copy.deepcopy(model)
for _ in range(9):
    tokens = batch()
    result = model(tokens)
    loss = F.cross_entropy(result.flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for mine, theirs in zip(average.parameters(), model.parameters()):
        mine.data.lerp_(theirs.data, 0.1)
"""

CHECKPOINT = """
import sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = HOW
        return x

model = Model()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(9):
    model(torch.ones(4, 8, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CALLS = {"plain": "block(x)"}
CALLS |= {
    name: f"checkpoint(block, x, use_reentrant={name == 'reentrant'})" for name in ("reentrant", "not reentrant")
}


@pytest.fixture(scope="module")
def runs(lab):
    scripts = {"leak": LEAK, "result": RESULT}
    scripts |= {name: CHECKPOINT.replace("HOW", call) for name, call in CALLS.items()}
    return lab.start(scripts, dict.fromkeys(scripts, SHORT))


def account_of(run):
    assert run.exit_code == 0, run.stderr
    (report,) = analyze_memory([open_session(run.folder)]).reports
    found = report.account
    for parts in vars(found.live_at_peak).values():
        assert sum(part.bytes for part in parts) == found.peak_bytes
    return found


def owners(found) -> dict[str, int]:
    return {part.name: part.bytes for part in found.live_at_peak.by_owner}


@pytest.mark.long
@pytest.mark.skipif(not SHOWS_SAVED_TENSORS, reason="this torch does not show saved tensors")
def test_a_leak_is_in_the_peak_and_the_first_thing_that_is_said(runs):
    found = account_of(runs["leak"])
    (entry,) = found.left_alive
    # The head's input, the log-softmax, the tokens, the total weight. What is evaluated after a step belongs to the
    # next one: the last of them is yet to come, and of the one before the graph alone is a leak, not the loss.
    a_graph, loss, num = 10 * 8 * 4 + 10 * 16 * 4 + 10 * 8 + 4, 4, NUM_STEPS_BEFORE - 1

    assert entry.bytes == owners(found)["left_alive"] == num * a_graph + (num - 1) * loss
    assert entry.frame == "train.py:11 evaluated"
    text = terminal_text(memory_document(analyze_memory([open_session(runs["leak"].folder)]))).splitlines()
    assert text[0].startswith(f"Leak: {entry.bytes / 1024:.2f} KiB ")
    assert max(map(len, text)) <= 100
    (note,) = json.loads((runs["leak"].folder / files.RECORDING_FILE).read_text())["notes"]
    assert f"{entry.bytes:,} bytes" in note["text"] and "train.py:11 evaluated" in note["text"]


def test_the_last_steps_result_and_an_average_of_the_weights_are_there_too(runs):
    found = account_of(runs["result"])
    tokens, result, loss, average = 2 * 5 * 8, 2 * 5 * 16 * 4, 4, 2 * 16 * 8 * 4
    start = found.stages[0]

    with gzip.open(runs["result"].folder / files.MEMORY_FILE) as stream:
        allocations = json.load(stream)["allocations"]
    others = [each["bytes"] for each in allocations if each["owner"] == "other"]
    assert sum(others) == tokens + result + loss + average
    assert all(each["born"] is None for each in allocations if each["owner"] == "other")
    weights = gradients = average
    assert start.after_bytes == weights + gradients + sum(others)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_a_checkpointed_model_has_the_names_of_one_that_is_not(runs, how):
    def names(run) -> set[str | None]:
        with gzip.open(run.folder / files.MEMORY_FILE) as stream:
            return {each["module"] for each in json.load(stream)["allocations"]}

    plain = {f"blocks.{block}.{layer}" for block in (0, 1) for layer in (0, 1, 2)} | {None}
    assert names(runs["plain"]) == plain
    assert names(runs[how]) - {"", "blocks.0", "blocks.1"} == plain
    assert runs[how].recording.facts["roots"] == ["Model"]
    account_of(runs[how])
