"""A point under `stepscope run` ends with whoever asked for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLOW = """
import time, torch
class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.25)
        return super().forward(x)
def build():
    return Slow(4, 4), lambda: torch.randn(2, 4)
"""
STUDY = """
import sys
from pathlib import Path
from stepscope.sweep.grid import Grid
from stepscope.sweep.record_runs import record_point
from stepscope.workloads.registry import find
(point,) = Grid(find("slow.py:build"), {"device": "cpu", "mode": "step"}).points([{}])
record_point(point, Path("out").absolute(), ("--warmup", "100", "--clean", "60"), 600)
"""


@pytest.mark.long
def test_a_recorded_point_ends_soon_after_a_killed_study(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    with subprocess.Popen([sys.executable, "-c", STUDY], cwd=tmp_path) as study:
        (child,) = _wait_for(lambda: _children(study.pid))
        _wait_for(lambda: list(tmp_path.glob("out/recordings/*/samples.jsonl")) or not _is_there(child))
        assert _is_there(child)
        study.send_signal(signal.SIGKILL)

    _wait_for(lambda: not _is_there(child), seconds=20)  # of steps that would take 40 s


def _children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(found, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")
