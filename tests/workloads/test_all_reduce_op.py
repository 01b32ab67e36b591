"""all_reduce: sums over real processes, which go when they are not needed and are missed when they die."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from evidence import evidence_of

from stepscope.errors import UsageError
from stepscope.workloads.ops import all_reduce
from stepscope.workloads.ops.all_reduce import WORKLOAD

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture
def build():
    built = []

    def make(**values):
        built.append(WORKLOAD.build(WORKLOAD.configure("tiny", **values)))
        return built[-1]

    yield make
    for each in built:
        each.module.group.close()
    assert not dist.is_initialized()


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_two_ranks_are_summed_forward_and_backward_and_proven(build):
    built = build(world_size=2)
    (peer,) = built.module.group._peers
    x = built.batch()["x"]

    total = built.module(x)
    total.backward(torch.full_like(x, 5.0))

    torch.testing.assert_close(total, x + 1)
    assert x.grad.unique().tolist() == [6.0]
    evidence = evidence_of(built)
    assert built.proofs[0].shows(evidence) == "all_reduce ×2 of 2"
    assert {**evidence.facts, "largest_error": 0.0}.items() >= {
        "world_size": 2.0,
        "message_bytes": 4096.0,
        "bus_bytes": 4096.0,
    }.items()
    assert evidence.facts["largest_error"] < 1e-6
    seconds = evidence.facts["collective_seconds"]
    assert evidence.facts["bus_bytes_per_s"] == pytest.approx(4096 / seconds) and 1e-6 < seconds < 10

    with pytest.raises(UsageError, match="one message size per run"):
        built.module(x.double())
    with pytest.raises(UsageError, match="already belongs to a process group"):
        WORKLOAD.build(WORKLOAD.configure("tiny"))
    built.module.group.close()
    assert peer.returncode is not None


def test_one_rank_alone(build):
    built = build(world_size=1)
    batch = built.batch()

    assert torch.equal(built.module(**batch), batch["x"])
    assert built.proofs[0].shows(evidence_of(built))
    assert built.facts()["bus_bytes"] == built.facts()["bus_bytes_per_s"] == 0


def test_no_proof_of_another_world():
    from stepscope.workloads.workload import Evidence

    built = WORKLOAD.build(WORKLOAD.configure("tiny", world_size=1))
    (proof,) = built.proofs
    del built
    gc.collect()  # the group goes with its module

    assert not dist.is_initialized()
    there = Evidence(device="cpu", ops={"gloo:all_reduce": 1}, kernels={}, facts={"world_size": 1.0})
    assert proof.shows(there)
    assert proof.shows(Evidence(device="cpu", ops={"aten::add": 1}, kernels={}, facts={"world_size": 1.0})) is None
    assert proof.shows(Evidence(device="cpu", ops=there.ops, kernels={}, facts={"world_size": 2.0})) is None


@pytest.mark.long
def test_a_peer_that_dies_is_said_at_once(build):
    built = build(world_size=2)
    batch = built.batch()
    built.module(**batch)
    os.kill(built.module.group._peers[0].pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        for _ in range(1000):
            built.module(**batch)


def test_a_peer_that_never_starts_is_said(monkeypatch):
    monkeypatch.setattr(all_reduce.sys, "executable", "/bin/false")

    with pytest.raises(RuntimeError, match="rank 1 ended with exit code 1"):
        WORKLOAD.build(WORKLOAD.configure("tiny", world_size=2))
    assert not dist.is_initialized()


@pytest.mark.long
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")  # noqa: PTH112
def test_peers_go_when_rank_0_is_killed():
    code = (
        "import time; from stepscope.workloads.ops.all_reduce import WORKLOAD as w\n"
        "b = w.build(w.configure('tiny')); b.module(**b.batch())\n"
        "print(b.module.group._peers[0].pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank0:
        peer = int(rank0.stdout.readline())
        assert alive(peer)
        rank0.kill()

    for _ in range(200):
        if not alive(peer):
            break
        time.sleep(0.05)
    assert not alive(peer)


@pytest.mark.parametrize("world_size", [0, -1])
def test_no_ranks_are_refused(world_size):
    with pytest.raises(UsageError, match="at least 1"):
        WORKLOAD.build(WORKLOAD.configure(world_size=world_size))


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(UsageError, match="one GPU per rank, found 1"):
        all_reduce._check(2, "nccl")
