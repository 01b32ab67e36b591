"""Sweeps on a real Ray cluster of three nodes on this machine, with workers, nodes and drivers killed meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray", reason="pip install 'stepscope[ray]': Ray is not a test dependency, it has 240 MB")

from sweep_runs import ODD, rows_in

from stepscope.errors import StepscopeError
from stepscope.sweep.engines.start import spread_over
from trace_builder import TraceBuilder

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
STORE_BYTES = 80 << 20
PYTHONPATH = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent)])
NUM_POINTS, NUM_KILLS = 200, 20
QUICK = ("--device", "cpu", "--warmup", "1", "--steps", "2")


@pytest.fixture(scope="module")
def cluster():
    made = new_cluster(3)
    yield made
    made.shutdown()


def new_cluster(num_nodes):
    """Start a head without CPUs, and nodes of one CPU."""
    from ray.cluster_utils import Cluster

    os.environ["OMP_NUM_THREADS"] = "1"
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(num_nodes):
        add_node(made)
    return made


def add_node(cluster):
    """Add a node of one CPU. Ray gives it 30 s to start, which a busy machine may not keep."""
    for is_last in (False, False, True):
        try:
            return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        except Exception:
            if is_last:
                raise


def project(folder, cluster, **settings):
    """Write the settings of a project that runs its sweeps on the cluster."""
    folder.mkdir(exist_ok=True)
    table = {"address": cluster.address, "jobs": 8, **settings}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    (folder / "pyproject.toml").write_text("\n".join(["[tool.stepscope.engine]", *lines, ""]))
    return folder


def driver(folder, *words, on="ray"):
    command = [sys.executable, "-m", "stepscope", *map(str, words), "--on", on]
    with (folder / "driver.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def raylets(cluster):
    return [node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes]


def busy(cluster):
    """Return workers that run a point, and the processes of the points: in one look, because points are short."""
    children = defaultdict(list)
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(place.read_text(errors="replace").rpartition(")")[2].split()[1])
            children[parent].append(int(place.parent.name))
    workers, points = [], []
    for raylet in raylets(cluster):
        for worker in children[raylet]:
            for server in children[worker]:
                if children[server]:
                    workers.append(worker)
                    points += children[server]
    return workers, points


def _killed(dice, processes):
    """Return whether one of these processes could be killed; they may just have ended."""
    try:
        os.kill(dice.choice(processes), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return False
    return True


def num_rows(folder):
    path = folder / "out" / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_no_row_is_lost_or_doubled_by_kills_of_workers_nodes_and_drivers(cluster, tmp_path):
    widths = ",".join(map(str, range(1, NUM_POINTS + 1)))
    sweep = ("bench", f"{ODD}:whole", "--set", f"width={widths}", *QUICK, "-o", "out")
    here = project(tmp_path / "here", cluster)
    assert driver(here, *sweep, on="local").wait() == 0
    there, dice, kills = project(tmp_path / "there", cluster), random.Random(7), Counter()
    running = driver(there, *sweep)
    # The same number of each in the end, in a random order, spread over the sweep.
    plan = ["worker"] * 7 + ["point"] * 4 + ["node"] * 5 + ["driver"] * 4
    dice.shuffle(plan)
    for number, kind in enumerate(plan):
        while num_rows(there) < number * (NUM_POINTS // (NUM_KILLS + 2)):  # the last before the sweep's end
            assert running.poll() is None, (there / "driver.txt").read_text()[-3000:]
            time.sleep(0.05)
        time.sleep(dice.random() / 2)
        if kind == "driver":
            running.kill()
            running.wait()
            running = driver(there, *sweep, "--resume")
        elif kind == "node":
            cluster.remove_node(dice.choice(list(cluster.worker_nodes)), allow_graceful=False)
            add_node(cluster)
        else:
            while not _killed(dice, busy(cluster)[kind == "point"]):
                assert running.poll() is None, (there / "driver.txt").read_text()[-3000:]
                time.sleep(0.02)
        kills[kind] += 1
    assert running.wait() == 0, (there / "driver.txt").read_text()[-3000:]

    assert sum(kills.values()) == NUM_KILLS
    rows = rows_in(there / "out")
    assert len(rows) == NUM_POINTS == len({row["hash"] for row in rows})
    expected = {row["hash"]: (row["loss"], row["final_loss"]) for row in rows_in(here / "out")}
    assert {row["hash"]: (row["loss"], row["final_loss"]) for row in rows} == expected
    assert [row["hash"] for row in rows] == [row["hash"] for row in rows_in(here / "out")]
    assert {row["status"] for row in rows} == {"ok"}
    assert sum(row.get("attempts", 1) > 1 for row in rows) > 0
    said = (there / "driver.txt").read_text()
    # Ray may know of the worker's end before that of its node.
    assert re.search(r"was lost.*; trying again, attempt 2 of 3", said) and " queued, " in said


def test_ranks_are_read_on_nodes_also_if_workers_are_killed(cluster, tmp_path):
    folder = project(tmp_path / "project", cluster, attempts=2)
    (folder / "ranks").mkdir()
    for rank in range(6):
        made = TraceBuilder(distributedInfo={"rank": rank, "world_size": 6}).step(1, 0, 100)
        made.op("aten::mm", 1, 5, id=1).launch("gemm", 2, (5, 20 + rank), id=1).annotation("nccl:all_reduce", 8, 5)
        made.launch("ncclKernel_AllReduce", 9, (25 + rank, 65 - rank), id=2)
        made.write(folder / "ranks" / f"rank{rank}.json")
    for words in (
        ["analyze", "ranks", "--json"],
        ["diagnose", "ranks", "--json"],
        ["report", "ranks", "-o", "x.json"],
    ):
        said = []
        for more in ([], ["--on", "ray"]):
            command = [
                sys.executable,
                "-m",
                "stepscope",
                *words,
                "--no-cache",
                *more,
                *["--force"] * (words[0] == "report"),
            ]
            said.append(subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout)
            said[-1] += (folder / "x.json").read_bytes() if words[0] == "report" else b""
        assert said[0] == said[1] and len(said[0]) > 1000

    lines, places = [], [(str(tmp_path), str(tmp_path / f"pids{number}")) for number in (1, 2)]
    settings = {"address": cluster.address, "attempts": 2, "runtime_env": {"env_vars": {"PYTHONPATH": PYTHONPATH}}}
    spread = spread_over("ray", settings, lines.append)
    assert list(spread("odd_calls", "killed_once", places)) == [2, 2]
    assert len(lines) == 2 and all(
        "was lost (WorkerCrashedError); trying again, attempt 2 of 2" in each for each in lines
    )
    with pytest.raises(StepscopeError, match=r"a worker on node .* was lost \(WorkerCrashedError\) \(2 attempts\)"):
        list(spread("odd_calls", "always_killed", places[:1]))


def test_interrupting_a_sweep_ends_its_tasks(cluster, tmp_path):
    folder = project(tmp_path / "project", cluster)
    words = ("bench", f"{ODD}:build", "--set", "kind=hang", "--set", "width=8,16", *QUICK, "-o", "out")
    running = driver(folder, *words)
    while len(busy(cluster)[1]) < 2:
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 130
    deadline = time.monotonic() + 60
    while busy(cluster)[1]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert num_rows(folder) == 0 and "interrupted; continue with" in (folder / "driver.txt").read_text()


def test_tune_and_verify_run_on_a_node(cluster, tmp_path):
    folder = project(tmp_path / "project", cluster)
    words = ("tune", "cs336", "--preset", "tiny", "--set", "seq_len=16", "--over", "attention", "--device", "cpu")
    assert driver(folder, *words, "--minutes", "3", "-o", "out").wait() == 0, (folder / "driver.txt").read_text()
    rows = rows_in(folder / "out")
    assert len(rows) > 2 and all("num_neighbors" in row for row in rows)

    (folder / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(64, 64)\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(40):\n    model(torch.ones(8, 64)).square().mean().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    words = ("verify", "--on", "ray", "--rounds", "1", "--clean", "6", "-o", "fix", "--fix", "unfused_optimizer")
    with (folder / "driver.txt").open("ab") as log:
        command = [sys.executable, "-m", "stepscope", *words, "train.py"]
        assert subprocess.call(command, cwd=folder, stdout=log, stderr=log) in (0, 3)
    runs = {path.parent.name for path in (folder / "fix").glob("*/recording.json")}
    assert runs == {"without-0", "without-1", "unfused_optimizer-0", "unfused_optimizer-1"}


def test_a_point_that_keeps_being_lost_has_a_row_that_says_so(cluster, tmp_path):
    folder = project(tmp_path / "project", cluster, attempts=2)
    words = ("bench", f"{ODD}:build", "--set", "kind=killed,ok", *QUICK, "--mode", "forward", "-o", "out")
    assert driver(folder, *words).wait() == 1
    by_kind = {row["config"]["kind"]: row for row in rows_in(folder / "out")}
    assert by_kind["ok"]["status"] == "ok"
    assert (by_kind["killed"]["status"], by_kind["killed"]["attempts"]) == ("crashed", 2)
    assert by_kind["killed"]["killed"] and "SIGKILL" in by_kind["killed"]["reason"]


def test_a_sweep_whose_head_is_lost_says_so_and_can_be_finished(tmp_path):
    """Ray alone would print its own lines after 60 s and end the process."""
    sweep = ("bench", f"{ODD}:whole", "--set", f"width={','.join(map(str, range(1, 41)))}", *QUICK, "-o", "out")
    first = new_cluster(2)
    folder = project(tmp_path / "project", first, patience_s=5)
    running = driver(folder, *sweep)
    while num_rows(folder) < 3:
        assert running.poll() is None, (folder / "driver.txt").read_text()
        time.sleep(0.05)
    os.kill(first.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
    assert running.wait(120) == 2
    kept = rows_in(folder / "out")
    first.shutdown()

    said = [line for line in (folder / "driver.txt").read_text().splitlines() if not re.match(r"\d+/40 ", line)]
    assert len(said) == 2 and "Ray does not answer: the cluster's head at " in said[0]
    assert "Ray has not answered for 5 s" in said[1] and "finished rows are kept; continue with --resume" in said[1]
    assert 3 <= len(kept) < 40
    second = new_cluster(2)
    assert driver(project(folder, second), *sweep, "--resume").wait() == 0, (folder / "driver.txt").read_text()
    second.shutdown()
    rows = rows_in(folder / "out")
    assert [row["config"]["width"] for row in rows] == list(range(1, 41))
    assert {row["status"] for row in rows} == {"ok"}
    again = {row["hash"]: row for row in rows}
    assert all(again[row["hash"]] == row for row in kept)
