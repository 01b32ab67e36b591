"""Sweeps on a real Slurm of two nodes on this machine: jobs are submitted, cancelled, requeued and lost."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("submitit", reason="submitit is not installed: pip install 'stepscope[slurm]'")

from slurm_cluster import Slurm, why_not
from sweep_runs import ODD, bench_words, rows_in

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
QUICK = ("--device", "cpu", "--warmup", "1", "--steps", "2", "--mode", "forward", "--on", "slurm", "-o", "out")


@pytest.fixture
def slurm(monkeypatch):
    with Slurm() as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield cluster


def driver(folder, *words, **settings):
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in settings.items()]
    (folder / "pyproject.toml").write_text("\n".join(["[tool.stepscope.engine]", *lines, ""]))
    with (folder / "driver.txt").open("ab") as log:
        return subprocess.Popen(bench_words(f"{ODD}:build", *words, *QUICK), cwd=folder, stdout=log, stderr=log)


def said(folder):
    return (folder / "driver.txt").read_text()


def wait_for(is_there, running=None):
    deadline = time.monotonic() + 120
    while not (found := is_there()):
        assert time.monotonic() < deadline
        assert running is None or running.poll() is None
        time.sleep(0.1)
    return found


def test_a_sweep_and_one_that_continues(slurm, tmp_path):
    template = {"partition": "main", "setup": ["export STEPSCOPE_TEST=1"], "jobs": 4}
    assert driver(tmp_path, "--set", "width=4,8,12", **template).wait() == 0, said(tmp_path)
    rows = rows_in(tmp_path / "out")
    assert [row["config"]["width"] for row in rows] == [4, 8, 12] and {row["status"] for row in rows} == {"ok"}
    assert {row["node"] for row in rows} == {"node0", "node1"}
    assert list((tmp_path / "out" / ".jobs").iterdir()) == []

    again = driver(tmp_path, "--set", "width=4,8,12,16", "--resume", **template)
    assert again.wait() == 0 and len(rows_in(tmp_path / "out")) == 4
    assert rows_in(tmp_path / "out")[:3] == rows


def test_a_job_that_is_requeued_has_one_row(slurm, tmp_path):
    running = driver(tmp_path, "--set", "kind=slow", "--set", "width=4,8", "--set", "pid_file=started")
    job = wait_for(lambda: (tmp_path / "started").exists() and slurm.jobs(), running)[0]
    assert slurm.call("scontrol", "requeue", str(job)) == ""
    # Slurm holds a requeued job back for two minutes unless told otherwise.
    wait_for(lambda: job in slurm.jobs("PENDING"))
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert running.wait() == 0, said(tmp_path)
    rows = rows_in(tmp_path / "out")
    assert len(rows) == 2 == len({row["hash"] for row in rows})
    assert sorted(row.get("attempts", 1) for row in rows) == [1, 2]


def test_ending_the_driver_cancels_its_jobs(slurm, tmp_path):
    running = driver(tmp_path, "--set", "kind=hang", "--set", "width=4,8,12")
    wait_for(lambda: len(slurm.jobs()) == 2 and slurm.jobs("PENDING"), running)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 130
    wait_for(lambda: not slurm.jobs() and not slurm.jobs("PENDING") and not slurm.jobs("COMPLETING"))
    assert "interrupted; continue with" in said(tmp_path)


def test_jobs_of_a_driver_that_was_killed_end_when_the_sweep_continues(slurm, tmp_path):
    running = driver(tmp_path, "--set", "kind=slow", "--set", "width=4,8,12,16")
    left = wait_for(slurm.jobs, running)
    running.kill()
    running.wait()
    assert driver(tmp_path, "--set", "kind=slow", "--set", "width=4,8,12,16", "--resume").wait() == 0
    rows = rows_in(tmp_path / "out")
    assert len(rows) == 4 == len({row["hash"] for row in rows})
    assert not set(left) & set(slurm.jobs())


def test_a_job_cancelled_from_outside_and_a_lost_node(slurm, tmp_path):
    running = driver(tmp_path, "--set", "kind=hang", "--set", "width=4", attempts=2)
    for _ in range(2):
        job = wait_for(slurm.jobs, running)[0]
        slurm.call("scancel", str(job))
        wait_for(lambda job=job: job not in slurm.jobs())
    assert running.wait() == 1
    (row,) = rows_in(tmp_path / "out")
    assert (row["status"], row["attempts"]) == ("lost", 2) and row["reason"].endswith("was cancelled from outside")

    running = driver(tmp_path, "--set", "kind=slow", "--set", "width=4,8,12,16,20,24", "--resume")
    wait_for(lambda: len(slurm.jobs()) == 2, running)
    slurm.lose("node0")
    assert running.wait() == 0, said(tmp_path)
    rows = rows_in(tmp_path / "out")
    assert [row["status"] for row in rows].count("ok") == 6 and len(rows) == 7


def test_a_controller_that_is_down_for_a_while(slurm, tmp_path):
    running = driver(tmp_path, "--set", "kind=slow", "--set", "width=4,8,12,16", jobs=2, attempts=5)
    wait_for(lambda: (tmp_path / "out" / "results.jsonl").exists() and rows_in(tmp_path / "out"), running)
    slurm.stop_controller()
    wait_for(lambda: "Slurm does not answer" in said(tmp_path), running)
    slurm.start_controller()
    assert running.wait() == 0, said(tmp_path)
    assert len(rows_in(tmp_path / "out")) == 4 and "Slurm answers again" in said(tmp_path)

    slurm.stop_controller()
    running = driver(tmp_path, "--set", "width=40", "--resume", patience_s=3)
    assert running.wait() not in (0, None)
    assert "Slurm has not answered for 3 s" in said(tmp_path) and "continue with --resume" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert len(rows_in(tmp_path / "out")) == 4


def test_a_partition_that_does_not_exist(slurm, tmp_path):
    assert driver(tmp_path, "--set", "width=4", partition="nowhere").wait() != 0
    assert "Slurm refuses a job" in said(tmp_path) and "partition" in said(tmp_path)
