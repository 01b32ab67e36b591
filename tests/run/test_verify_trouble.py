"""`stepscope verify` of fixes that do not help: one that has nothing to change, one that fails, one that is wrong."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.long

# No optimizer; attention that cuDNN cannot do on a processor; a sum that bfloat16 has not the digits for.
SCRIPT = """
import stepscope, torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.large = nn.Linear(8, 8)
        self.large.bias.data += 1000

    def forward(self, x):
        x = self.large(x) - 1000
        return F.scaled_dot_product_attention(x, x, x)

model = Model()
for step in range(100):
    loss = (model(torch.full((2, 4, 8), step / 100)) - 3).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    stepscope.step(tokens=64, loss=loss)
"""


@pytest.fixture(scope="module")
def run(lab):
    fixes = ("--fix", "unfused_optimizer", "--fix", "attention_backend=cudnn", "--fix", "autocast")
    return lab.script(SCRIPT).stepscope("verify", "--warmup", 5, "--clean", 10, "train.py", *fixes, "--rounds", 1)


def test_a_fix_with_nothing_to_change_is_not_applied(run):
    assert "unfused_optimizer: not applied reason no optimizer was made" in " ".join(run.stdout.split())


def test_a_fix_that_breaks_the_script_is_a_result_with_its_first_line(run):
    words = " ".join(run.stdout.split())  # however wide the terminal is
    assert "attention_backend=cudnn: failed" in words
    assert "reason RuntimeError: No viable backend for scaled_dot_product_attention was found." in words
    assert "Traceback" not in run.stdout + run.stderr


def test_a_loss_that_goes_astray_is_wrong_whatever_the_time(run):
    shown = " ".join(run.stdout[run.stdout.index("autocast: wrong") :].split())
    assert "the losses differ" in shown and "allowed 2.0 %" in shown
    assert "bf16 0 % → " in shown


def test_the_worst_decides_the_exit_code_and_what_failed_is_not_tried_again(run):
    assert run.exit_code == 3
    assert "3 fixes: 1 wrong, 1 failed, 1 not applied." in run.stdout
    folder = next((run.folder.parent / "runs").glob("verify-train-*"))
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert names == {
        "without-0",
        "without-1",
        "unfused_optimizer-0",
        "attention_backend=cudnn-0",
        "autocast-0",
        "autocast-1",
    }
