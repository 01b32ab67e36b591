"""Some of the faults of tests/fault_campaign.py: kills at operations and at random, full disks, lost processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, mounts and processes of Linux")


@pytest.mark.parametrize(
    ("cases", "verbs"),
    [
        (24, ["bench", "study", "report", "cache"]),
        pytest.param(1000, ["bench"], marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
        pytest.param(1000, ["study"], marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
        pytest.param(1000, ["report", "cache"], marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
        pytest.param(1000, ["run"], marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
    ids=["some", "bench", "study", "report and cache", "run"],
)
def test_nothing_is_lost_doubled_unreadable_or_false_after_a_fault(tmp_path, cases, verbs):
    """In a process of its own: its forks must not inherit threads."""
    words = ["--keep", str(tmp_path / "kills.jsonl"), "--cases", str(cases), "--verbs", *verbs]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kills.py"), *words], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(verbs) and all(line.endswith(", 0 broken") for line in lines)
    assert sum(int(line.split("), ")[1].split()[0]) for line in lines) > 0.4 * len(
        (tmp_path / "kills.jsonl").read_text().splitlines()
    )  # the faults did strike
