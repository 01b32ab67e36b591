"""An engine against the local runner: the same rows, and what happens if a node, a scheduler or a driver fails.

The engine here runs each order in a real process of this machine, as a cluster would on a node.
"""

from __future__ import annotations

import fcntl
import json
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from sweep_runs import ODD, rows_in

from stepscope import bench
from stepscope.analysis.comparison.sweeps import sweep_of
from stepscope.api.verification import _need_like_devices
from stepscope.errors import StepscopeError, UsageError
from stepscope.rows import is_tried_again
from stepscope.sweep.engines import start
from stepscope.sweep.engines.engine import DONE, LOST, QUEUED, Engine, SchedulerDown, State
from stepscope.sweep.engines.settings import settings_of
from stepscope.sweep.engines.work import _servers, neighbors, work
from stepscope.sweep.protocol import EXIT_CANNOT_WRITE, Ending
from stepscope.sweep.tuning.trials import Trials
from stepscope.version import __version__

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="points fork")
QUICK = {"device": "cpu", "warmup": 1, "steps": 2}


ONE = threading.Lock()  # a node's process has one order at a time


class Processes(Engine):
    """An engine whose nodes are processes. `faults` are what the next submissions or polls meet."""

    name, faults, orders = "the cluster", [], []

    def __exit__(self, *_):
        pass

    def submit(self, order, node):
        self.orders.append(order)
        fault = self.faults.pop(0) if self.faults else None
        if fault == "down":
            raise SchedulerDown("connection refused")
        if fault == "other":
            order = {**order, "id": "of another job"}
        if fault == "version":
            order = {**order, "version": "0.0.1"}
        if fault == "lost":
            return fault
        if fault == "full":  # a point's process that could neither write its result nor its log
            ending = Ending(exit_code=EXIT_CANNOT_WRITE, timed_out=False, memory_kill=False, seconds=1.0)
            return {"id": order["id"], "node": "seven", "num_neighbors": 0, "ending": asdict(ending), "log": b""}
        with ONE:
            return work(order)  # in this process: a node has imported torch before

    def poll(self, job):
        if job == "lost":
            return State(phase=LOST, reason="node seven was lost")
        return State(phase=DONE, answer=job, node=job["node"])

    def cancel(self, job):
        pass


@pytest.fixture(scope="module", autouse=True)
def node():
    """The process that starts points, for all tests here: it imports torch once."""
    yield
    for server in _servers.values():
        server.__exit__()
    _servers.clear()


@pytest.fixture
def engine(monkeypatch):
    from stepscope.sweep.engines import slurm_jobs

    monkeypatch.setattr(slurm_jobs, "SlurmEngine", Processes)
    monkeypatch.setattr(Processes, "faults", [])
    monkeypatch.setattr(Processes, "orders", [])
    return Processes


def run(folder, on="slurm", lines=None, resume=False, settings=None, name="whole", **knobs):
    values = {**({"width": [4, 3, 2]} if name == "whole" else {}), **knobs}
    say = ([] if lines is None else lines).append
    where = {"on": on, "engine": settings, "output": folder, "resume": resume}
    return bench(f"{ODD}:{name}", set=values, **QUICK, **where, on_line=say)


CHANGING = ("seconds", "started_at", "finished_at", "node", "num_neighbors", "notes", "environment_hash", "attempts",
            "peak_resident_bytes", "traced_ns", "first_call_ns")  # fmt: skip


def lasting(row):
    """Return the fields of a row that do not depend on when and where it was measured."""
    return {name: value for name, value in row.items() if name not in CHANGING and not name.startswith("samples_")}


def test_rows_are_those_of_a_local_sweep_in_the_same_order(engine, tmp_path):
    engine.faults[:] = [None, "lost"]

    run(tmp_path / "here", on="local")
    run(tmp_path / "there")

    here, there = rows_in(tmp_path / "here"), rows_in(tmp_path / "there")
    assert [lasting(row) for row in there] == [lasting(row) for row in here]
    assert [row["loss"] for row in there] == [row["loss"] for row in here] and here[0]["loss"] > 0
    assert {row["node"] for row in there} == {row["node"] for row in here}
    assert sorted(row.get("attempts", 1) for row in there) == [1, 1, 2]


def test_a_lost_point_is_tried_again_a_bounded_number_of_times(engine, tmp_path):
    engine.faults[:] = ["lost"] * 3
    lines = []

    sweep = run(tmp_path, lines=lines, width=[4])

    (row,) = rows_in(tmp_path)
    assert (row["status"], row["reason"], row["attempts"]) == ("lost", "node seven was lost", 3)
    assert sweep.num_by_status == {"lost": 1} and is_tried_again(row)
    assert [line for line in lines if "trying again" in line] == [
        "node seven was lost; trying again, attempt 2 of 3",
        "node seven was lost; trying again, attempt 3 of 3",
    ]

    run(tmp_path, resume=True, width=[4])

    (row,) = rows_in(tmp_path)
    assert row["status"] == "ok"


def test_the_answer_of_another_job_is_not_taken(engine, tmp_path):
    engine.faults[:] = ["other"]

    run(tmp_path, width=[4])

    (row,) = rows_in(tmp_path)
    assert (row["status"], row["attempts"], len(engine.orders)) == ("ok", 2, 2)


def test_a_node_whose_disk_is_full_says_nothing_about_the_point(engine, tmp_path):
    engine.faults[:] = ["full", None, *["full"] * 3]

    run(tmp_path / "one", width=[4])
    run(tmp_path / "all", width=[4])

    assert [(row["status"], row["attempts"]) for row in rows_in(tmp_path / "one")] == [("ok", 2)]
    (row,) = rows_in(tmp_path / "all")
    assert row["status"] == "lost" and row["reason"] == "a point could not write on seven. Is its disk full?"


def test_runs_that_are_compared_are_on_like_devices():
    results = SimpleNamespace(facts={"environments": {"a": {"device_name": "one"}}})
    trials = SimpleNamespace(_results=results, rows={"first": {"environment_hash": "a"}})
    for name, status in (("one", "ok"), ("another", "skipped")):
        row = {"status": "ok", "environment": {"device_name": name}}
        Trials._need_like_device(trials, row)
        assert row["status"] == status

    attempts = [
        SimpleNamespace(recording=SimpleNamespace(facts={"environment": {"device_name": name}}))
        for name in ("a", "b")
    ]
    _need_like_devices(attempts[:1])
    with pytest.raises(StepscopeError, match="Runs on a and b cannot be compared"):
        _need_like_devices(attempts)


def test_a_node_with_another_version_is_refused(engine, tmp_path):
    engine.faults[:] = ["version"] * 2

    run(tmp_path, width=[4], settings={"attempts": 2})

    (row,) = rows_in(tmp_path)
    assert row["status"] == "lost" and "this sweep 0.0.1. Install the same version" in row["reason"]


def test_a_scheduler_that_is_down_is_asked_again_and_then_given_up(engine, tmp_path):
    engine.faults[:] = ["down"] * 2
    lines = []

    run(tmp_path / "back", lines=lines, width=[4], settings={"patience_s": 5})

    assert [row["status"] for row in rows_in(tmp_path / "back")] == ["ok"]
    assert [line for line in lines if "answer" in line] == [
        "the cluster does not answer: connection refused. Asking again for 5 s",
        "the cluster answers again",
    ]

    engine.faults[:] = ["down"] * 100
    with pytest.raises(StepscopeError, match=r"has not answered for 1 s: connection refused.*--resume"):
        run(tmp_path / "gone", width=[4], settings={"patience_s": 1})
    assert rows_in(tmp_path / "gone") == []


def test_a_gate_runs_once_for_points_that_run_side_by_side(engine, tmp_path):
    run(tmp_path / "there", name="GATED", variant=["plain", "same"], width=[4, 6, 8])

    by_leader = {}
    for row in rows_in(tmp_path / "there"):
        assert row["gate"]["passed"]
        by_leader.setdefault(row["gate"].get("run_by"), []).append(row["config"]["variant"])
    assert sorted(by_leader.pop(None)) == ["plain", "same"]  # ran it; the others have its verdict
    assert sorted(map(tuple, by_leader.values())) == [("plain", "plain"), ("same", "same")]


def test_points_on_unlike_devices_are_not_ranked_together(engine, tmp_path):
    run(tmp_path, name="GATED", variant=["plain", "same"], width=[4])
    rows, facts = rows_in(tmp_path), json.loads((tmp_path / "sweep.json").read_text())
    assert sum(point.is_best for point in sweep_of(rows, facts["environments"]).points) == 1
    (known,) = facts["environments"].values()

    rows[1]["environment_hash"] = "other"
    sweep = sweep_of(rows, {**facts["environments"], "other": {**known, "device_name": "another"}})

    assert not any(point.is_best for point in sweep.points) and not any(point.speedup for point in sweep.points)


def test_neighbors_are_counted_from_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests have points on this machine too
    with neighbors() as first:
        with neighbors() as second:
            pass
        with neighbors():
            pass
    with neighbors() as alone:
        pass
    assert (len(first), len(second), len(alone)) == (2, 1, 0)


def test_a_file_of_neighbors_that_another_point_removes_before_it_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock, times = fcntl.flock, []

    def met_before(stream, how):
        times.append(stream.name)
        if len(times) == 1:
            Path(stream.name).unlink()
        lock(stream, how)

    monkeypatch.setattr(fcntl, "flock", met_before)
    with neighbors() as met:
        monkeypatch.undo()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with neighbors() as others:
            pass
    assert len(times) == 2 and len(met) == len(others) == 1


@pytest.mark.timeout(45)
def test_interrupting_cancels_what_runs(engine, tmp_path, monkeypatch):
    asked, cancelled, polled = [], [], set()
    monkeypatch.setattr(Processes, "submit", lambda self, order, node: [order["request"]["config"]["width"]])
    monkeypatch.setattr(Processes, "cancel", lambda self, job: cancelled.extend(job))

    def poll(self, job):
        polled.update(job)
        if len(polled) == 3 and not asked:
            asked.append(job)
            # As a scheduler ends the driver, at a moment when the signal does not wake the thread that waits.
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        time.sleep(0.05)
        return State(phase=QUEUED)

    monkeypatch.setattr(Processes, "poll", poll)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    until = time.monotonic() + 30
    while len(cancelled) < 3 and time.monotonic() < until:  # nobody waits for a thread that was just being started
        time.sleep(0.01)
    assert sorted(cancelled) == [2, 3, 4]


def test_two_drivers_on_one_sweep(engine, tmp_path):
    code = "import sys; from stepscope.sweep.results import Results; from pathlib import Path\n" \
           "with Results(Path(sys.argv[1]), {}, True, ''): print('held', flush=True); sys.stdin.read()"  # fmt: skip
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(UsageError, match="Another sweep is writing to"):
            run(tmp_path, resume=True)
        other.stdin.close()
    assert not engine.orders


def test_a_shared_disk_that_lags(tmp_path, monkeypatch):
    """The answer of a job that has ended comes later, at first without its content; or never."""
    from stepscope.sweep.engines import slurm_jobs

    monkeypatch.setattr(slurm_jobs, "POLL_S", 0.0)
    chosen = object.__new__(slurm_jobs.SlurmEngine)  # without submitit
    Engine.__init__(chosen, settings_of({"lag_s": 1000}), tmp_path, print)
    chosen._missing_since = {}
    monkeypatch.setattr(chosen, "_states", lambda: {"7": ("COMPLETED", "node1")})
    names = ("result_pickle", "submitted_pickle", "submission_file", "stdout", "stderr")
    paths = SimpleNamespace(**{name: tmp_path / name for name in names})
    job, whole = SimpleNamespace(job_id="7", paths=paths), pickle.dumps(("success", {"id": "1", "node": "node1"}))

    assert chosen.poll(job).phase == "running"
    for part in (b"", whole[:9]):
        paths.result_pickle.write_bytes(part)
        assert chosen.poll(job).phase == "running"
    paths.result_pickle.write_bytes(whole)
    assert chosen.poll(job) == State(phase=DONE, answer={"id": "1", "node": "node1"}, node="node1")
    assert not list(tmp_path.iterdir())

    chosen.settings = settings_of({"lag_s": 0})
    chosen.poll(job)  # since when it is missing
    state = chosen.poll(job)
    assert state.phase == LOST and state.reason.startswith("a point on node1 left no answer; see ")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("sbatch: error: Unable to contact slurm controller (connect failure)", SchedulerDown, "Unable to contact"),
        ("sbatch: error: invalid partition specified: x", StepscopeError, ": invalid partition specified: x. Check"),
        ("scancel: error: _establish_config_source: failed to fetch config\n"
         "scancel: fatal: Could not establish a configuration source", StepscopeError, "where `sinfo` works"),
    ],
)  # fmt: skip
def test_what_slurm_says_is_one_line(text, kind, said):
    from stepscope.sweep.engines.slurm_jobs import SlurmEngine

    with pytest.raises(kind, match=said):
        SlurmEngine._refuse(text)


@pytest.mark.parametrize(
    ("table", "said"),
    [({"partitoin": "a"}, "partition"), ({"jobs": 0}, "jobs = 0"), ({"setup": "module load"}, "list of texts")],
)
def test_settings_that_do_not_fit(table, said):
    with pytest.raises(UsageError, match=said):
        settings_of(table)


def test_an_engine_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StepscopeError, match=r"pip install 'stepscope\[ray\]'"):
        run(tmp_path, on="ray")
    with pytest.raises(UsageError, match="choose local, ray, slurm"):
        start.where_of("kubernetes", None)


@pytest.mark.long
def test_a_script_is_recorded_on_a_node(engine, tmp_path):
    """`verify` runs commands; their recordings come back as archives."""
    from stepscope.sweep.record_runs import Options, run_again, script_command

    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n    model(torch.ones(2, 4)).sum().backward()\n    optimizer.step()\n"
    )
    chosen = Processes(settings_of({}), tmp_path, print)
    command, output = script_command([str(script)], False), tmp_path / "without-0"

    assert run_again(command, output, Options(warmup=5, clean=2), None, False, engine=chosen) is None
    facts = json.loads((output / "recording.json").read_text())
    assert facts["status"] == "finished" and (tmp_path / "without-0.txt").exists()

    script.unlink()
    failure = run_again(command, tmp_path / "without-1", Options(), None, False, engine=chosen)
    assert failure is not None and "train.py" in failure.reason


def test_where_a_script_is_not_mounted(tmp_path):
    order = {
        "id": "1",
        "version": __version__,
        "process": {"folder": str(tmp_path / "nowhere")},
    }
    assert "Mount it on every node" in work(order)["refused"]
