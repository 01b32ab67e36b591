"""Real training loops under `stepscope run`, each with one fault that only the whole run shows."""

import pytest
from recorded_cases import run_script

from stepscope.findings.over_time import findings_over_time

LOOP = """
import gc, os, time, torch
torch.manual_seed({seed}); torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
kept, large = [], torch.zeros(12_000_000)
{before}
for step in range({num_steps}):
    x = torch.randn(16, 32)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {also}
"""
QUICK = ("--trace", "0", "--no-memory")


def found(forks, tmp_path, also: str, num_steps: int, before: str = "", seed: int = 0):
    script = LOOP.format(seed=seed, before=before, also=also, num_steps=num_steps)
    case = run_script(forks, tmp_path, script, *QUICK)
    return {each.id: (each, each.evidence[0].rows[0]) for each in findings_over_time(case.run)}


def test_saves_and_pauses_of_the_garbage_collector_are_named(forks, tmp_path):
    before = "class Node:\n    def __init__(self): self.me = self\nkept = [Node() for _ in range(20_000)]\n"
    before += "gc.unfreeze()"  # what a process froze before it forked: collections go through it as in any other
    also = "if step % 50 == 49: torch.save([net.state_dict(), large], 'model.pt')"
    also += "\n    if step >= 200 and step % 20 == 0: gc.collect()"
    findings = found(forks, tmp_path, also, 401, before)
    finding, row = findings["checkpoint_cost"]
    assert row["times"] == 8 and row["every_steps"] == pytest.approx(50, rel=0.05)
    assert row["step"] == pytest.approx(50, abs=20) and "train.py:" in finding.sentence
    _, row = findings["stalls"]
    assert row["what"] == "garbage_collection" and row["step"] == pytest.approx(200, abs=20)
    assert row["every_steps"] == pytest.approx(20, rel=0.05)


@pytest.mark.long
def test_a_list_that_leaks(forks, tmp_path):
    also = "time.sleep(0.004); kept += [torch.ones(25_000)] if step >= 700 else []"
    _, row = found(forks, tmp_path, also, 2_000)["memory_creep"]
    assert row["memory"] == "resident_bytes" and row["step"] == pytest.approx(700, abs=100)
    assert row["bytes_per_1000_steps"] == pytest.approx(100_000_000, rel=0.1)


@pytest.mark.long
def test_a_sleep_that_grows_one_percent_per_100_steps(forks, tmp_path):
    _, row = found(forks, tmp_path, "time.sleep(0.015 * (1 + step / 100 * 0.01))", 2_000)["drift"]
    assert row["kind"] == "drift" and row["step"] == pytest.approx(0, abs=100)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_20_clean_runs_have_no_finding(forks, tmp_path):
    for seed in range(20):
        assert found(forks, tmp_path / str(seed), "time.sleep(0.003)", 2_000, seed=seed) == {}
