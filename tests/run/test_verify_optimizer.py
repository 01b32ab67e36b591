"""`stepscope verify --fix unfused_optimizer` of a script whose optimizer goes from parameter to parameter."""

from __future__ import annotations

import json

import pytest

import stepscope
from stepscope.errors import UsageError

pytestmark = pytest.mark.long

SCRIPT = """
from tiny import *

model = nn.Sequential(nn.Embedding(16, 8), *(nn.LayerNorm(8) for _ in range(100)), nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for step in range(100):
    loss_of(model, batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FAILING = "raise RuntimeError('this script never worked')\n"


@pytest.fixture(scope="module")
def found(lab):
    words = ("--warmup", 5, "--clean", 12, "train.py", "--fix", "unfused_optimizer", "--rounds", 1, "--json")
    run = lab.script(SCRIPT).stepscope("verify", *words)
    assert run.exit_code in (0, 4), run.stderr  # one round says what it measured, and has no verdict
    return json.loads(run.stdout)["fixes"][0]


def test_it_is_made_fused_and_the_step_is_shorter(found):
    assert found["changed"]["AdamW made with fused=True instead of a loop"] == 1
    assert found["change"]["share"] < -0.1 and found["saving_ns"] > 0
    assert found["change"]["num_samples"] == [1, 1] and len(found["rounds"]) == 1
    assert found["expected"] is None  # a script, and no recording


def test_it_learns_the_same(found):
    losses = found["losses"]
    assert (losses["verdict"], losses["noise_share"], losses["limit_share"]) == ("agree", 0, 1e-3)
    assert losses["num_steps"] == 17 and losses["difference_share"] < 1e-4


@pytest.mark.long
def test_it_is_a_function_too(lab, monkeypatch):
    monkeypatch.chdir(lab.script(SCRIPT).folder)
    told = []

    words = {"fix": "unfused_optimizer", "rounds": 1, "warmup": 5, "clean": 6, "output": "from_python"}
    found = stepscope.verify("train.py", "an argument", **words, on_line=told.append)

    (fix,) = found.fixes
    assert (fix.status, found.exit_code, found.command) == ("too few samples", 4, "train.py 'an argument'")
    assert fix.change.num_samples == (1, 1) and fix.losses.verdict == "agree"
    assert told[:3] == ["rehearsal: without", "rehearsal: with unfused_optimizer", "round 1 of 1: without"]
    assert told[3].startswith("round 1 of 1: with unfused_optimizer, about ")
    with pytest.raises(UsageError, match="Unknown fix 'nosuch'"):
        stepscope.verify("train.py", fix="nosuch")
    with pytest.raises(UsageError, match="0 rounds"):
        stepscope.verify("train.py", fix="autocast", rounds=0)


def test_a_script_that_fails_by_itself_is_the_users_affair(lab):
    run = lab.script(FAILING).stepscope("verify", "train.py", "--fix", "autocast")
    assert run.exit_code == 2
    assert run.stderr == "stepscope verify: the script fails without a fix: RuntimeError: this script never worked\n"
