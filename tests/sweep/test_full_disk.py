"""A disk that is really full, and processes that are lost: no status is made up, and `--resume` goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sweep_runs import ODD

from stepscope.errors import RecordingError
from stepscope.sweep.grid import Grid
from stepscope.sweep.results import Results
from stepscope.sweep.runner import Options, Runner, run_points
from stepscope.sweep.server import Server
from stepscope.workloads.registry import find

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts and processes of Linux")
QUICK = {"device": "cpu", "mode": "forward", "warmup": 1, "steps": 2}


@pytest.fixture
def disk(tmp_path):
    """A disk of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"a disk cannot be mounted: {error}")
    if done.returncode:
        pytest.skip(f"a disk cannot be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Fill the disk but for so many bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler = disk / "filler"
    filler.write_bytes(bytes(free - left))
    return filler


def sweep(folder: Path, server: Server, kinds: str = "ok", during=None) -> dict[str, dict]:
    """Measure three points that have no row yet; the rows by width."""
    workload = find(f"{ODD}:build")
    points = Grid(workload, QUICK).points([{"kind": kinds.split(","), "width": [4, 5, 6]}])
    with Results(folder, {"command": "test"}, True, "stepscope bench --resume") as results:
        runner = Runner(workload, server, results, Options(timeout_s=60))
        try:
            run_points(points, results, runner.run if during is None else lambda point: during(runner, point))
        finally:
            rows = {(row["config"]["kind"], row["config"]["width"]): row for row in results.rows}
    return rows


@pytest.mark.parametrize("left", [0, 4096, 8192])
def test_a_full_disk_stops_the_sweep_and_makes_no_point_crash(disk, server, left):
    folder = disk / "sweep"
    with Results(folder, {"command": "test"}, True, ""):
        pass
    filler = fill(disk, left)

    said = pytest.raises(RecordingError, match=r"Cannot write to .*stepscope bench --resume")
    with said if left < 8192 else contextlib.suppress(RecordingError):  # a row or two may fit
        sweep(folder, server)
    filler.unlink()
    rows = sweep(folder, server)

    assert [row["status"] for row in rows.values()] == ["ok"] * 3
    assert not any(row.get("attempts") for row in rows.values())


@pytest.mark.long
def test_a_point_whose_server_or_process_is_killed_is_measured_by_the_next_sweep(tmp_path, server):
    """GIVEN the second point is killed and the third loses its server WHEN the sweep is resumed THEN all are ok."""
    num_run = 0

    def lose(runner: Runner, point) -> dict:
        nonlocal num_run
        num_run += 1
        if num_run == 1:
            return runner.run(point)
        threading.Thread(target=kill_soon, args=(server, num_run == 3)).start()
        return runner.run(point)

    def kill_soon(server: Server, whole: bool) -> None:
        pid = server._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        end = time.monotonic() + 30
        while not (found := children.read_text().split()) and time.monotonic() < end:
            time.sleep(0.005)
        os.kill(pid if whole else int(found[0]), signal.SIGKILL if whole else signal.SIGTERM)

    rows = sweep(tmp_path / "sweep", server, "slow", during=lose)
    statuses = [(row["status"], row.get("killed", False)) for row in rows.values()]
    assert statuses == [("ok", False), ("crashed", True), ("crashed", True)]
    again = sweep(tmp_path / "sweep", server, "slow")

    assert [(row["status"], row.get("attempts")) for row in again.values()] == [("ok", None), ("ok", 2), ("ok", 2)]
    assert len((tmp_path / "sweep" / "results.jsonl").read_text().splitlines()) == 3
