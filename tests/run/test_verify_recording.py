"""`stepscope verify` of a real recording: its script is run again with and without the fix that diagnose asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.trace.recording import read_recording

pytestmark = pytest.mark.long

# A DataLoader that takes 4 ms for a sample.
SCRIPT = """
import os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader
assert "STEPSCOPE_FIX" not in os.environ
torch.manual_seed(0)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((8,), float(index % 5))

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for x in DataLoader(Slow(), batch_size=4):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def verified(lab):
    """A script that was recorded and is verified: where, and the answer."""
    script = lab.script(SCRIPT)
    script.run("1e-3", options=("--warmup", 2, "--clean", 6, "--trace", 2, "--exit-after", "--quiet"))
    words = (
        "--fix",
        "waiting_for_data=2",
        "--rounds",
        1,
        "-o",
        "proof",
        "--warmup",
        5,
        "--clean",
        12,
        "--json",
        "--yes",
    )
    run = script.stepscope("verify", "recording", *words)
    assert run.exit_code == 4 and "1 round cannot rule out chance" in run.stderr, run.stderr + run.stdout
    return script, json.loads(run.stdout)


def test_workers_hide_the_time_that_samples_take(verified):
    (found,) = verified[1]["fixes"]

    assert found["change"]["verdict"] == "faster", found
    assert found["status"] == "too few samples" and "at least 4 are needed" in found["reason"]
    assert found["changed"] == {"DataLoaders with num_workers=2 instead of 0": 1}
    assert found["losses"]["difference_share"] == 0  # the same arithmetic
    assert found["losses"]["limit_share"] == 1e-6
    assert found["saving_ns"] > 2e6


def test_what_was_expected_stands_beside_it(verified):
    expected = verified[1]["fixes"][0]["expected"]

    assert expected["saving_ns"] > 8e6 and expected["share"] > 0.2 and expected["confidence"]


def test_every_run_is_a_recording_of_clean_steps_beside_the_answer(verified):
    script, answer = verified
    folder = Path(answer["folder"])
    assert folder == script.folder / "proof"
    assert json.loads((folder / "verify.json").read_text()) == answer
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert names == {"without-0", "without-1", "waiting_for_data=2-0", "waiting_for_data=2-1"}
    for name in names:
        recording = read_recording(folder / name)
        assert (recording.status, len(recording.window("clean"))) == ("finished", 12)
        assert recording.facts["command"]["argv"] == ["train.py", "1e-3"]
        assert not recording.window("trace") and len(recording.window("memory")) == name.endswith("-0")
        assert bool(recording.facts.get("fixes")) == (not name.startswith("without"))


def test_nothing_is_told_to_have_changed_that_has_not(verified):
    answer = verified[1]
    assert answer["command"] == "train.py 1e-3" and answer["num_rounds"] == 1
    assert answer["warnings"] == [] and answer["apart_share"] == 0
