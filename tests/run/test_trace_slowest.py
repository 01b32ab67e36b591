"""`run --trace-ranks slowest`: all ranks time their steps, and the one that the others wait for traces."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from stepscope.recorder.history.pace import Pace
from stepscope.session import open_session
from verbs import run_verb

SCRIPT = """
import sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(16):
        time.sleep(0.1 if rank == 1 else 0.01)
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, args=sys.argv[1:2], nprocs=3, start_method="fork")
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ranks fork")
def test_three_gloo_ranks_of_which_one_is_slow(tmp_path):
    """In processes of its own: a traced child of a child of the server of forks hung at its exit, in 2 of 25 runs."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "run"
    options = ["--warmup", "3", "--clean", "6", "--trace-ranks", "slowest", "--no-memory", "--quiet", "-o", str(run)]
    words = [sys.executable, "-m", "stepscope", "run", *options, "train.py", str(tmp_path / "store")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    session = open_session(run)
    assert [(file.path.parent.parent.name, file.rank) for file in session.trace_files] == [("rank1", 1)]
    assert session.case.rank == 1
    for rank, recording in session.rank_recordings.items():
        read = recording.recording
        assert len([sample for sample in read.samples if sample.window == "clean"]) == 6
        (note,) = [note["text"] for note in read.facts["notes"] if note["about"] == "trace"]
        assert note.startswith("only the slowest of 3 traces: rank1 takes 1") and ("this one" in note) == (rank != 1)
        assert (read.facts.get("trace") is None) == (rank != 1)


def test_ranks_that_see_none_or_some_of_the_others(tmp_path):
    (tmp_path / "recording.json").write_text("{}")
    paces = {rank: Pace(tmp_path / f"rank{rank}") for rank in (1, 2)} | {0: Pace(tmp_path)}
    assert paces[0].slowest()[0], "nothing is known yet"
    for rank, forward_ns in ((0, 30), (2, 30)):
        for step in range(3):
            paces[rank].add(step, {"data": 5, "forward": forward_ns, "backward": 100 - forward_ns})
        paces[rank].publish()
    assert [paces[rank].slowest()[0] for rank in (0, 2)] == [False, True], "of equals, one"
    paces[0].add_device(1, {"forward": 90, "backward": 1})
    paces[0].add_device(2, {"forward": 91, "backward": 1})
    paces[0].add_device(9, {"forward": 5_000})  # of no timed step
    paces[0].publish()
    assert [paces[rank].slowest()[0] for rank in (0, 2)] == [True, False]
    assert json.loads((tmp_path / "control" / "pace.rank0.json").read_text()) == {"own_ns": 90}
    (tmp_path / "control" / "pace.rank1.json").write_text('{"own_ns"')
    assert paces[0].slowest()[0] and paces[1].slowest()[0], "one too many rather than none"


def test_what_does_not_go_together():
    for words, said in (
        (["--trace-ranks", "fastest"], "name ranks, such as 0,8,16, or slowest"),
        (["--trace-ranks", "slowest", "--clean", "0"], "needs timed steps"),
    ):
        done = run_verb("run", *words, "train.py")
        assert done.returncode == 2 and said in done.stderr
