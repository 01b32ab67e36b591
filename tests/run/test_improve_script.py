"""`stepscope improve` as a user runs it: a script that gets faster, a kill in the middle, and nothing to improve."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

pytestmark = pytest.mark.long

# Sleeping stands for a slow disk: two workers halve the time, however busy the machine is.
SLOW_DATA = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((8,), index / 100_000)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Slow(), batch_size=4):
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
WORDS = ("-m", "stepscope", "improve", "--warmup", 5, "--clean", 10, "--minutes", 30, "--fix", "waiting_for_data")


def test_a_script_gets_faster_and_a_kill_costs_one_run(lab):
    """GIVEN a search that is killed after its second run WHEN it is started again THEN it goes on and finds 1.3×."""
    script = lab.script(SLOW_DATA)
    process = script.popen(*WORDS, "--fix", "sdpa", "train.py")
    while not (rows := list(script.folder.glob("runs/improve-*/runs.jsonl"))) or rows[0].read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.2)
    before = rows[0].read_text().splitlines()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()

    done = script.python(*WORDS, "--fix", "sdpa", "--json", "train.py")

    found = json.loads(done.stdout)
    assert rows[0].read_text().splitlines()[: len(before)] == before and len(list(rows[0].parents[1].iterdir())) == 1
    assert found["num_runs"] == len(rows[0].read_text().splitlines()) == 7
    assert found["kept"] == ["waiting_for_data"] and found["losses"]["difference_share"] == 0
    assert found["gain"]["factor"] >= 1.3 and found["gain"]["low"] > 1
    assert {trial["fix"]: trial["status"] for trial in found["trials"]}["sdpa"] == "nothing to change"
    assert "continuing in" in done.stderr and "num_workers" in found["code"][0]


# It draws its batches and its weights without a seed, refuses bfloat16, and has nothing else to change.
STUBBORN = """
import torch
from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no bfloat16 here")
        return super().forward(x)

model = Model(8, 8)
for _ in range(100_000):
    loss = (model(torch.randn(4, 8)) - 1).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    import stepscope
    stepscope.step(loss=loss)
"""


def test_a_change_that_crashes_is_a_result_and_nothing_pays(lab):
    script = lab.script(STUBBORN)
    done = script.python(*WORDS, "--fix", "autocast", "--fix", "unfused_optimizer", "train.py")

    shown = " ".join(done.stdout.split())
    assert done.exit_code == 0 and "Nothing paid for train.py: tried autocast." in shown
    assert "autocast failed: RuntimeError: no bfloat16 here" in shown
    assert "unfused_optimizer nothing to change: no optimizer was made" in shown
    assert "from run to run" in shown and "Seed the script" in shown
