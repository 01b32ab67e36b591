"""A job that stops stepping says so, with each rank's phase and line, and its dumps name the collective."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

pytest.importorskip("torch")

import torch

import stepscope
from dump_maker import calls, write
from stepscope.recorder.history.silence import where_is

SCRIPT = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    if step == 30 and dist.get_rank() == 1:
        time.sleep(25)  # HANGS
        raise SystemExit
    model(torch.randn(2, 8)).square().mean().backward()  # WAITS
    optimizer.step()
"""
LINES = {word: number for number, line in enumerate(SCRIPT.splitlines(), 1) for word in line.split("# ")[1:]}


@pytest.mark.long
def test_each_rank_says_where_it_is_and_the_dumps_name_the_collective(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "STEPSCOPE_SILENT_SECONDS": "4", "TORCH_FR_BUFFER_SIZE": "200",
        }  # fmt: skip
        words = [
            "-m",
            "stepscope",
            "run",
            "-o",
            tmp_path / "job",
            "--trace",
            "0",
            "--no-memory",
            tmp_path / "train.py",
        ]
        started.append(subprocess.Popen([sys.executable, *words], env=environment, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=200)[1] for process in started]
    hang = stepscope.hang(tmp_path / "job")

    states = {state.rank: (state.phase, state.stack[0]) for state in hang.states}
    waits, hangs = f"train.py:{LINES['WAITS']} <module>", f"train.py:{LINES['HANGS']} <module>"
    assert states == {0: ("backward", waits), 1: ("other", hangs)}
    said = next(line for line in errors[0].splitlines() if "no step has ended" in line)
    assert (
        "on 2 of 2 ranks" in said and f"rank 0: backward at {waits}" in said and f"rank 1: other at {hangs}" in said
    )
    assert hang.first is not None and hang.first.arrived == (0,) and [each.rank for each in hang.first.absent] == [1]
    assert "Rank 1 did not come to" in str(hang) and hangs in str(hang)


def test_the_phase_of_a_thread_is_told_by_its_innermost_frame():
    inside, leave = threading.Event(), threading.Event()

    class Waits(torch.nn.Module):
        def forward(self, _):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=Waits(), args=(1,))
    thread.start()
    inside.wait(20)
    phase, stack = where_is(sys._current_frames()[thread.ident])
    leave.set()
    thread.join()

    assert phase == "forward" and any(line.startswith("test_silence.py:") and "forward" in line for line in stack)
    assert where_is(None) == ("other", [])


def test_states_of_a_recording_are_read_with_and_without_dumps(tmp_path):
    state = '{"rank": %d, "host": "a", "step": 9, "phase": "data", "stack": ["train.py:3 f"], "silent_s": 61.5}'
    (tmp_path / "rank1").mkdir()
    (tmp_path / "hang.json").write_text(state % 0)
    (tmp_path / "rank1" / "hang.json").write_text(state % 1)
    hang = stepscope.hang(tmp_path)
    assert [each.rank for each in hang.states] == [0, 1] and hang.first is None
    assert "No step ended for 62 s" in str(hang) and "ranks 0, 1: data at train.py:3 f" in str(hang)
    write(tmp_path / "hang", {0: calls("all_reduce", "all_reduce"), 1: calls("all_reduce")})
    (tmp_path / "rank1" / "hang.json").write_text('{"rank": -1}')
    hang = stepscope.hang(tmp_path)
    assert [each.rank for each in hang.first.absent] == [1] and [each.rank for each in hang.states] == [0]
