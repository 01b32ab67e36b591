"""`stepscope verify --fix compile`, with code generated for a processor, of a script that does not seed itself."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.long

SCRIPT = """
from tiny import *
torch.seed()  # another one each time
model = nn.Sequential(nn.Embedding(16, 8), nn.GELU(), nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100):
    train_step()
"""


@pytest.fixture(scope="module")
def verified(lab):
    script = lab.script(SCRIPT.replace("train_step()", "loss_of(model, batch()).backward(); optimizer.step()"))
    run = script.stepscope(
        "verify", "--warmup", 6, "--clean", 10, "train.py", "--fix", "compile", "--rounds", 1, "--json"
    )
    assert run.exit_code in (0, 4), run.stderr
    return json.loads(run.stdout)


def test_the_root_is_compiled_even_where_it_is_a_sequential(verified):
    found = verified["fixes"][0]
    assert found["changed"]["Sequential compiled"] == 1 and found["changed"]["compiled graphs"] >= 1
    assert found["status"] in ("too few samples", "no difference shown")  # of one round
    assert found["change"]["num_samples"] == [1, 1]


def test_losses_are_held_to_how_far_two_runs_without_it_are_apart(verified):
    losses = verified["fixes"][0]["losses"]
    assert losses["verdict"] == "agree" and losses["tolerance_share"] == 1e-3
    assert losses["noise_share"] > 1e-3 and losses["difference_share"] > 1e-3
    assert losses["limit_share"] == pytest.approx(1e-3 + 2 * losses["noise_share"])


def test_compiling_costs_a_warm_up_that_is_told(verified):
    assert verified["fixes"][0]["warmup_extra_ns"] > 0
