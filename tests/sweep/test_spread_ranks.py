"""Ranks of a folder read on the nodes of a cluster: the same figures as here, and what happens if a node fails.

The engine here runs each order in this process, as a cluster would on a node. Real Ray is in test_ray_engine.py.
"""

from __future__ import annotations

import sys
import time

import pytest

from stepscope import analyze, diagnose, report
from stepscope.cli.main import main
from stepscope.errors import MissingDependencyError, StepscopeError, TraceError, UsageError
from stepscope.session import rank_accounts
from stepscope.sweep.engines import ray_tasks
from stepscope.sweep.engines.engine import DONE, LOST, Engine, State
from stepscope.sweep.engines.start import spread_over
from stepscope.sweep.engines.work import work
from trace_builder import TraceBuilder

NUM_RANKS = 4


class Nodes(Engine):
    """Nodes that answer at once. `faults` are what the next submissions meet."""

    name, faults, orders = "Ray", [], []

    def __exit__(self, *_):
        pass

    def submit(self, order, node):
        self.orders.append(order)
        fault = self.faults.pop(0) if self.faults else None
        return work({**order, "version": "0.0.1"} if fault == "version" else order) if fault != "lost" else fault

    def poll(self, job):
        return State(phase=LOST, reason="node seven was lost") if job == "lost" else State(phase=DONE, answer=job)

    def cancel(self, job):
        pass


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(ray_tasks, "RayEngine", Nodes)
    monkeypatch.setattr(Nodes, "faults", [])
    monkeypatch.setattr(Nodes, "orders", [])
    return Nodes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of ranks, of which one computes for longer; it is named by a relative path, as people do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_accounts, "KEPT", 2)
    (tmp_path / "ranks").mkdir()
    for rank in range(NUM_RANKS):
        compute = 50 if rank == 3 else 20
        made = TraceBuilder(distributedInfo={"rank": rank, "world_size": NUM_RANKS}).step(1, 0, 100)
        made.op("aten::mm", 1, 5, id=1).launch("gemm", 2, (5, compute), id=1).annotation("nccl:all_reduce", 8, 5)
        made.launch("ncclKernel_AllReduce", 9, (5 + compute, 85 - compute), id=2)
        made.write(tmp_path / "ranks" / f"worker{rank}.json")
    return "ranks"


def test_every_verb_has_the_same_figures(nodes, folder, capsys, tmp_path):
    """Of ranks in memory and in the file."""
    nodes.faults[:] = [None, "lost", "version"]

    shares = []
    assert "".join(analyze(folder, on="ray", progress=shares.append).json_text()) == "".join(
        analyze(folder).json_text()
    )
    assert len(nodes.orders) == NUM_RANKS + 2 and shares[-1] == 1.0
    report(folder, on="ray", output=tmp_path / "there.json")
    report(folder, output=tmp_path / "here.json")
    assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()
    said = []
    for more in ([], ["--on", "ray"]):
        assert main(["diagnose", folder, "--json", "--no-cache", *more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "rank" in said[0]
    assert len(nodes.orders) == 3 * NUM_RANKS + 2


def test_one_rank_and_one_file_are_read_here(nodes, folder):
    assert analyze(folder, rank=3, on="ray").to_json() == analyze(folder, rank=3).to_json()
    assert analyze(f"{folder}/worker3.json", on="ray").to_json() == analyze(f"{folder}/worker3.json").to_json()
    assert nodes.orders == []


def test_a_rank_that_keeps_being_lost_is_one_line(nodes, folder, capsys, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.stepscope.engine]\njobs = 1\n")
    nodes.faults[:] = [None, "lost", "lost", "lost"]

    assert main(["analyze", folder, "--on", "ray", "--no-cache"]) == 2

    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith("worker1.json: node seven was lost (3 attempts)") and "Traceback" not in said
    assert said[0] == "node seven was lost; trying again, attempt 2 of 3"


def test_errors_are_those_of_reading_here(nodes, folder, tmp_path):
    (tmp_path / "ranks" / "worker3.json").write_text('{"traceEvents": [')
    for on in ("local", "ray"):
        with pytest.raises(TraceError, match=r"worker3\.json.*move it elsewhere"):
            analyze(folder, on=on)
    with pytest.raises(UsageError, match=r"no step 7"):
        analyze(folder, step=7, on="ray")


def test_traces_that_do_not_say_their_ranks_are_named(nodes, tmp_path):
    for name in ("a", "b"):
        TraceBuilder().step(1, 0, 100).op("aten::mm", 1, 5, id=1).launch("gemm", 2, (5, 9), id=1).write(
            tmp_path / f"{name}.json"
        )
    here, there = diagnose(tmp_path), diagnose(tmp_path, on="ray")

    assert (
        any("nor their names say their ranks" in note for note in there.warnings) and here.warnings == there.warnings
    )


def test_two_traces_of_one_rank_are_refused(nodes, folder, tmp_path):
    (tmp_path / "ranks" / "worker11.json").write_bytes((tmp_path / "ranks" / "worker1.json").read_bytes())
    for on in ("local", "ray"):
        with pytest.raises(UsageError, match="both of rank 1"):
            diagnose(folder, on=on)


def test_a_file_that_nodes_do_not_have(nodes, folder, tmp_path):
    spread = spread_over("ray", {"attempts": 2})

    with pytest.raises(StepscopeError, match=r"nowhere does not exist on .*Mount it on every node \(2 attempts\)"):
        list(spread("stepscope.session.rank_accounts", "account_for_others", [("/nowhere", None)]))


def test_few_answers_wait_to_be_taken(nodes, tmp_path):
    taken = spread_over("ray", {"jobs": 3})("operator", "itemgetter", [(str(tmp_path), n) for n in range(20)])

    next(taken)
    time.sleep(0.2)  # more of them would be begun meanwhile
    assert len(nodes.orders) <= 4
    assert len(list(taken)) == 19 and len(nodes.orders) == 20


def test_ray_that_is_not_installed_and_slurm(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'stepscope\[ray\]'"):
        analyze(folder, on="ray")
    with pytest.raises(UsageError, match="choose local or ray"):
        analyze(folder, on="slurm")
