"""Four ranks on two "hosts": separate folders, clocks shifted on purpose, gathered into one recording."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median

import pytest

pytest.importorskip("torch")

from stepscope.analysis.time.loop_time import measured_steps
from stepscope.document.card import Card
from stepscope.session import open_session
from stepscope.session.gather import gather
from stepscope.session.job_clocks import clocks_of
from stepscope.trace.recording import read_recording

SCRIPT = """
import json, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begun, ended = [], []
for step in range(45):
    time.sleep(0.09 if rank == 3 else 0.03)  # rank 3 is slow to load its data
    begun.append(time.perf_counter())
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    ended.append(time.perf_counter())
    optimizer.zero_grad()
print(json.dumps([begun, ended]))
"""
MONOTONIC_NS, DAY_S = 7_300_000_000, 2.5


def shift(folder: Path) -> None:
    """Make the clocks of a host different: the one since its boot, and the time of day."""
    for name in ("samples.jsonl", "history.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for line in lines:
            for key, by in (("start_ns", MONOTONIC_NS), ("began", DAY_S), ("t", DAY_S)):
                if key in line:
                    line[key] += by
            if "host" in line:
                line["host"] = "node1"
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_hosts_become_one_recording_with_their_clocks_known(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(4):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        words = ["-m", "stepscope", "run", "-o", tmp_path / f"node{rank // 2}" / "job", "--trace", "0", "--no-memory",
                 "--quiet", tmp_path / "train.py"]  # fmt: skip
        started.append(subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.PIPE, text=True))
    output = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4
    for rank in (2, 3):
        shift(tmp_path / "node1" / "job" / f"rank{rank}")
    sources = [tmp_path / "node0" / "job", tmp_path / "node1" / "job"]
    found = gather(sources, tmp_path / "job")
    again = gather(sources, tmp_path / "job")

    assert found.ranks == (0, 1, 2, 3) and found.copied == (0, 1, 2, 3) and again.copied == ()
    session = open_session(tmp_path / "job")
    logs = [json.loads(each.splitlines()[-1]) for each in output]  # the script's own times, of the same steps
    slope, waits = 0.0, []
    for folder, (begun, ended) in zip((session.path, *session.rank_folders.values()), logs):
        recording = read_recording(folder)
        took = [ended[each.step] - ended[each.step - 1] for each in measured_steps(recording, False)]
        slope += 8 * len(took) / sum(took)
        waits.append(fmean(begun[each.step] - ended[each.step - 1] for each in recording.window("clean")))
    per_s, (_, ended) = Card.of(session).summary.throughput.per_s, logs[0]
    assert per_s == pytest.approx(4 * 8 * 34 / (ended[-1] - ended[10]), rel=0.05)
    assert per_s == pytest.approx(slope, rel=0.05)
    clocks, step_ns = clocks_of(session), session.summary.step_ns.median
    for row in clocks.clocks.iter_rows(named=True):
        is_far = row["rank"] > 1
        wrong = {name: row[name] - is_far * MONOTONIC_NS for name in ("offset_ns", "earliest_ns", "latest_ns")}
        assert wrong["earliest_ns"] <= 0 <= wrong["latest_ns"] and not row["is_contradicted"]
        assert abs(wrong["offset_ns"]) <= row["uncertainty_ns"] < step_ns
        assert abs(row["skew_ns"] - is_far * DAY_S * 1e9) <= row["skew_uncertainty_ns"]
        assert row["spread_ns"] < 60_000_000, "less than the lateness of rank 3"
    (late,) = clocks.late
    assert (late.rank, late.host, late.phase, late.where) == (3, "node1", "before_forward", "host")
    assert late.last_share > 0.5
    assert late.excess_ns == pytest.approx(1e9 * (waits[3] - median(waits)), rel=0.1) and waits[3] - waits[0] > 0.05
