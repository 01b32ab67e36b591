"""Whatever function of ours fails, and whenever, the script does what it would have done alone."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("faults.py")
OPTIONS = ("run", "--quiet", "-o", "recording", "--warmup", "2", "--clean", "3", "--trace", "1")

TRAINS = """
import gc, hashlib, logging, subprocess, sys
from tiny import *
from torch.utils.data import DataLoader, TensorDataset

class Attends(Model):
    def forward(self, tokens):
        x = F.dropout(self.embedding(tokens), 0.1, self.training)[:, None]
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])

model = Attends()
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cpu")
data = DataLoader(TensorDataset(torch.randint(16, (24, 5))), batch_size=2, shuffle=True)
for epoch in range(2):
    for step, (tokens,) in enumerate(data):
        loss = loss_of(model, tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(step, loss.item().hex(), torch.rand(()).item().hex())
        if step % 5 == 4:
            logging.getLogger("train").warning("a line for the log")
            gc.collect()
            model.eval()
            with torch.no_grad():
                print(model(tokens).sum().item().hex(), torch.multinomial(torch.ones(9), 3).tolist())
            model.train()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
subprocess.run(["true"], env={})
print(hashlib.sha256(open("checkpoint.pt", "rb").read()).hexdigest())
sys.exit(3)
"""

# Optimizers that take turns, an update by hand, stepscope's own functions, TorchScript, a profiler, a child process.
ODD = """
import os
import stepscope
from tiny import *

def child():
    for _ in range(3):
        train_step()
    print("child", loss_of(model, batch()).item().hex(), flush=True)
    os._exit(5)

critic = nn.Linear(8, 1)
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(lambda _: None)
for step in range(4):
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.data.add_(torch.autograd.grad(critic(torch.ones(2, 8)).sum(), [parameter])[0], alpha=-0.1)
optimizers = [optimizer, torch.optim.SGD(critic.parameters(), lr=0.1)]
for step in range(14):
    with stepscope.phase("data"):
        tokens = batch()
    loss = loss_of(model, tokens) + critic(model.embedding(tokens)).mean()
    loss.backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
    print(step, loss.item().hex())
    if step == 4:
        print(torch.jit.trace(critic, torch.ones(2, 8))(torch.ones(2, 8)).sum().item().hex())
    if step == 5:
        torch.jit.script(critic)
    if step == 12:
        with torch.profiler.profile() as profiler:
            critic(torch.ones(2, 8))
        print(any(event.key == "aten::linear" for event in profiler.key_averages()))
        if not (pid := os.fork()):
            child()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
for step in range(4):
    train_step()
    stepscope.step(tokens=10)
{}["the end"]
"""

SCRIPTS = {"trains": TRAINS, "odd": ODD}

# Every function that code other than ours calls: each passes the errors of what it calls to the wall.
ENTRIES = {
    ("recorder/asides.py", "_Garbage._collects"),
    ("recorder/hooks.py", "_optimizer_hooks.<locals>.begins"),
    ("recorder/hooks.py", "_optimizer_hooks.<locals>.ended"),
    ("recorder/hooks.py", "_scaler_patch.<locals>.begins.<locals>.<lambda>"),
    ("recorder/ledger/ledger.py", "Ledger.__torch_dispatch__"),
    ("recorder/ledger/storages.py", "Storages.born.<locals>.<lambda>"),
    ("recorder/ledger/storages.py", "Storages._died"),  # by the line before
    ("recorder/model.py", "_CallChain.__call__"),
    ("recorder/patches.py", "Patch.__init__.<locals>.wrapper"),
    ("recorder/patches.py", "Around.__init__.<locals>.wrapper"),
    ("recorder/patches.py", "_Replaced.__init__.<locals>.<lambda>"),
    ("recorder/precision/attention_calls.py", "AttentionCalls._call"),
    ("recorder/processes/imports.py", "AfterImport.find_spec"),
    ("recorder/processes/imports.py", "AfterImport._watch.<locals>.exec_module"),
    ("recorder/processes/launch.py", "hide_own_frames.<locals>.excepthook"),
    ("recorder/processes/launch.py", "own_imports"),  # Python closes a generator that was never started
    ("recorder/processes/start.py", "_patch_popen.<locals>.start"),
    ("recorder/roots.py", "ModuleCalls.__init__.<locals>.call"),
    ("recorder/session.py", "Session.explicit_step"),
    ("recorder/usual/steps.py", "UsualSteps.around_backward.<locals>.backward"),
    ("recorder/usual/steps.py", "UsualSteps.around_data.<locals>.fetch"),
    ("recorder/usual/steps.py", "UsualSteps.optimizer_hooks.<locals>.begins"),
    ("recorder/usual/steps.py", "UsualSteps.optimizer_hooks.<locals>.ended"),
    ("recorder/wall.py", "guarded.<locals>.call"),
    ("recorder/wall.py", "surrounded"),
    ("api/recording.py", "step"),
    ("api/recording.py", "phase"),
}
# Without these there is no script.
LAUNCHES = {
    ("cli/run.py", "_Run.prepare"),
    ("recorder/processes/launch.py", "run_program"),
    ("recorder/processes/launch.py", "raise_as_script"),
}


@dataclass
class Lab:
    """One script, what it does alone, and what it does with a fault."""

    script: object
    forks: object
    alone: tuple = ()
    calls: dict = field(default_factory=dict)
    entered: set = field(default_factory=set)

    def start(self) -> Lab:
        self.alone = self.ended(["train.py"])
        assert self.ended(self.words(None)) == self.alone
        found = json.loads((self.script.folder / "faults.json").read_text())
        self.calls = {(file, name): num for file, name, num in found["calls"]}
        self.entered = {tuple(each) for each in found["entered"]}
        return self

    def words(self, fault) -> list[str]:
        return [str(HARNESS), json.dumps(fault), *OPTIONS, "--force", "train.py"]

    def ended(self, words) -> tuple:
        code, stdout, stderr = self.forks.run(words, self.script.folder, {})
        self.stderr = stderr
        return code, stdout, "Traceback" in stderr, stderr.count("KeyError: 'the end'")

    def targets(self) -> list[tuple[str, str, int]]:
        """Return the first, the second and the last call of each function of ours."""
        inside = sorted(set(self.calls) - ENTRIES - LAUNCHES)
        return [(*key, number) for key in inside for number in sorted({1, min(2, self.calls[key]), self.calls[key]})]

    def changes(self, fault) -> str | None:
        ended = self.ended(self.words(fault))
        said = [line for line in self.stderr.splitlines() if line.startswith("stepscope: ")]
        if ended != self.alone:
            return f"{fault}: {ended} instead of {self.alone}\n{self.stderr[-3000:]}"
        return None if len(said) <= 1 else f"{fault}: said {said}"


@pytest.fixture(scope="module")
def labs(lab, forks):
    """Forks have the recorder before any script begins, so that the faults are in what it does."""
    return {name: Lab(lab.script(source), forks).start() for name, source in SCRIPTS.items()}


def test_the_script_reaches_nothing_of_ours_but_through_a_guard(labs):
    for each in labs.values():
        assert {key for key in each.entered - LAUNCHES if key[1] != "<module>"} <= ENTRIES
    assert sum(len(each.targets()) for each in labs.values()) > 1000


def test_a_fault_anywhere_changes_no_script(labs):
    chosen = random.Random(0)
    for each in labs.values():
        assert [change for fault in chosen.sample(each.targets(), 5) if (change := each.changes(fault))] == []


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_fault_everywhere_in_turn_changes_no_script(labs, name):
    assert [change for fault in labs[name].targets() if (change := labs[name].changes(fault))] == []
