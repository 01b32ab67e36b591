"""A sweep in this process, with its points in real processes of a real server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from sweep_runs import ODD, bench_words, quiet_environment

from stepscope.sweep.grid import Grid
from stepscope.sweep.results import Results
from stepscope.sweep.runner import Options, Runner
from stepscope.sweep.server import Server
from stepscope.workloads.registry import find

QUICK = {"device": "cpu", "mode": "forward+backward", "warmup": 1, "steps": 2}


@pytest.fixture(scope="session")
def server():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Server("fork" if sys.platform == "linux" else "spawn") as started:
        yield started


@pytest.fixture
def rows_of(server, tmp_path):
    """Run points of a workload of this folder and return their rows."""

    def run(name, *words, defaults=QUICK, options=None):
        workload = find(f"{ODD}:{name}")
        grid = Grid(workload, defaults)
        with Results(tmp_path / "sweep", {"command": "test"}, True, "") as results:
            runner = Runner(workload, server, results, options or Options(timeout_s=60))
            return [runner.run(point) for point in grid.points([grid.words(words)])]

    return run


@pytest.fixture
def bench(tmp_path):
    """Run the verb in a process: exit code, standard output, standard error."""

    def run(*words):
        done = subprocess.run(
            bench_words(*words), capture_output=True, text=True, cwd=tmp_path, env=quiet_environment(), timeout=200
        )
        return done.returncode, done.stdout, done.stderr

    return run
