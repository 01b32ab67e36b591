"""One rank of FSDP2: predicted peaks against those of a real one, whose process group has nobody else in it."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepscope.cli.main import main
from stepscope.devices.limits import find_device
from stepscope.planner.allocator import Allocator
from stepscope.planner.dataless_steps import trace
from stepscope.planner.emulation.fsdp import units
from stepscope.planner.emulation.ranks import ERROR_BAR
from stepscope.planner.hardware import hardware_of
from stepscope.planner.parallel import Parallel
from stepscope.planner.prediction import Planner
from stepscope.sweep import measure, prepare
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

MIB = 1 << 20
TRANSPOSING_BYTES = 60 * 60 * 4
"""What a CPU's copy of a transposed matrix takes inside: a gradient is copied at many a peak."""
H200 = find_device("NVIDIA H200")
OWN = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.blocks[0].weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()

class Around(Tied):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return (x @ self.blocks[0].weight).sum()

class Scalar(Around):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

def tied():
    return Tied(), lambda: torch.randn(2, 8)

def around():
    return Around(), lambda: torch.randn(2, 8)

def scalar():
    return Scalar(), lambda: torch.randn(2, 8)

def whole():
    model = nn.Linear(8, 8)
    return lambda: model(torch.randn(2, 8)).sum().backward()
"""


def point_of(workload, **values):
    grid = Grid(find(workload), {"device": "cpu"})
    return grid.points([grid.words([f"{name}={value}" for name, value in values.items()])], False)[0]


def measured_bytes(point, num_ranks):
    """The most bytes of tensors of a rank at once, in a step that is not the first: every allocation it makes."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (num_ranks,))
        workload = find(point.workload)
        built = prepare.build(workload, workload.config(**point.config), 0, "cpu")
        for unit in units(built.module):
            fully_shard(unit, mesh=mesh)
        one_pass = prepare.Pass(built.module, prepare.make_batch(built, 0, "cpu"), point.run)
        one_pass()
        one_pass()
        one_pass.drop_gradients()
        before = [getattr(tensor, "_local_tensor", tensor) for tensor in one_pass.tensors()]
        return measure.traced(one_pass, "cpu", before, None).peak_bytes
    finally:
        dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "workload", "values"),
    [
        (2, "cs336", {}),
        (3, "cs336", {}),
        (8, "hydra", {}),
        (4, "nano", {}),
        (4, "cs336", {"attention": "sdpa", "dtype": "autocast_bf16", "batch": 1, "seq_len": 32}),
        (4, "cs336", {"checkpoint": 1}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_a_rank_on_a_cpu(num_ranks, workload, values):
    point = point_of(workload, preset="tiny", **values, mode="step")

    predicted = Planner(find(workload), Parallel(fsdp=num_ranks)).predict(point, None)

    measured = measured_bytes(point, num_ranks)
    assert predicted.peak_allocated_bytes == pytest.approx(measured, abs=TRANSPOSING_BYTES + measured * 1e-4)
    assert sum(predicted.live_at_peak.values()) == predicted.peak_allocated_bytes
    assert (predicted.fsdp, predicted.error_bar) == (num_ranks, ERROR_BAR)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "workload", "values", "measured"),
    [
        (2, "cs336", {"preset": "small", "seq_len": 512}, 4_856_867_328),
        (8, "nano", {"preset": "decoder_medium", "seq_len": 2048, "dtype": "bf16"}, 3_892_263_424),
    ],
)
def test_a_rank_as_an_h200_measured_it(num_ranks, workload, values, measured):
    """`benchmarks/fsdp_accuracy.py` with torch 2.11: docs/plan-accuracy.md has them all."""
    found = Planner(find(workload), Parallel(fsdp=num_ranks)).predict(point_of(workload, **values, mode="step"), H200)

    assert found.peak_allocated_bytes == pytest.approx(measured, rel=0.001)


def test_a_rank_has_its_rows_of_every_parameter():
    """Of the first dimension, rounded up; the optimizer has two numbers for each of them, and a count."""
    point = point_of("cs336", preset="tiny", mode="step")
    module = prepare.build(find("cs336"), find("cs336").config(**point.config), 0, "cpu").module
    shards = [-(-p.shape[0] // 3) * math.prod(p.shape[1:]) for p in module.parameters()]

    live = Planner(find("cs336"), Parallel(fsdp=3)).predict(point, None).live_at_peak

    assert live["parameter"] == 4 * sum(shards)
    assert live["optimizer_state"] == 8 * sum(shards) + 4 * len(shards)


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_what_a_block_gathers_comes_and_goes(optimizer):
    point = point_of("cs336", preset="tiny", mode="step", optimizer=optimizer)
    config, ranks = find("cs336").config(**point.config), Parallel(fsdp=4)
    traced = trace(find("cs336"), config, point.run, hardware_of(H200), parallel=ranks)
    begin = traced.step_begins[1]
    entries = [e for e in traced.memory["allocations"] if e["born"] is not None and e["born"] >= begin]

    # Forward and backward; what is not in a block stays from one to the other.
    gathered = [(e["module"], e["phase"]) for e in entries if e["owner"] == "unsharded_parameter"]
    assert gathered.count(("blocks.0.mlp.up", "forward")) == gathered.count(("blocks.0.mlp.up", "backward")) == 1
    assert [phase for module, phase in gathered if module == "head"] == ["forward"]
    assert all(entry["died"] is not None for entry in entries if entry["owner"] == "unsharded_parameter")
    # The optimizer works on shards, from its first step on.
    allocations = traced.memory["allocations"]
    shards = [e["bytes"] for e in allocations if e["owner"] == "parameter"]
    assert max(e["bytes"] for e in allocations if e["phase"] == "optimizer") == max(shards)
    # Streams of their own: to gather into, and to reduce into, which is where gradients are.
    streams = {(e["owner"], e["phase"], e.get("stream", 0)) for e in entries}
    assert ("communication", "forward", 1) in streams and ("communication", "backward", 0) in streams
    assert {stream for owner, _, stream in streams if owner == "gradient"} == {3}
    assert {stream for owner, _, stream in streams if owner == "unsharded_gradient"} == {0}


def test_the_model_is_never_on_the_device_as_a_whole():
    found = Planner(find("cs336"), Parallel(fsdp=16)).predict(
        point_of("cs336", preset="small", mode="forward", batch=1, seq_len=8), H200
    )

    assert found.parameters == 128_625_408
    assert found.peak_reserved_bytes < 4 * 128_625_408


def test_streams_do_not_share_memory():
    heap = Allocator()
    heap.free(heap.allocate(30 * MIB, stream=1))

    heap.allocate(30 * MIB)
    assert heap.reserved_bytes == 60 * MIB
    heap.allocate(30 * MIB, stream=1)
    assert heap.reserved_bytes == 60 * MIB


def test_the_text_and_the_json_say_whose_memory_it_is(capsys):
    assert main(["plan", "nano", "--preset", "tiny", "--fsdp", "4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one rank of 4 on NVIDIA H100" in text and f"error bar ±{100 * ERROR_BAR:.0f} %" in text
    assert "unsharded parameters" in text
    assert f"FSDP2: an approximation, ±{ERROR_BAR:.0%}" in text

    assert main(["plan", "nano", "--preset", "tiny", "--fsdp", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fsdp"], found["error_bar"], found["predictions"][0]["fsdp"]) == (4, ERROR_BAR, 4)


@pytest.mark.parametrize("ranks", ["0", "-1", "x", "1", "2.5", "²", "99999999"])
def test_a_number_of_ranks_that_is_none(ranks, capsys):
    assert main(["plan", "cs336", "--preset", "tiny", f"--fsdp={ranks}"]) == 2
    assert "from 2 to 16384" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("tied", [], "share a parameter"),
        ("around", [], "only while the block is called"),
        ("scalar", [], "scalar parameters"),
        ("whole", [], "let the function return the model"),
        ("tied", ["--mode", "inference"], "--mode forward"),
    ],
)
def test_what_cannot_be_sharded_is_refused(name, words, why, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = FSDPParam.alloc_all_gather_outputs, dist.all_gather_into_tensor

    assert main(["plan", f"mine.py:{name}", "--fsdp", "2", *words]) == 2

    assert why in capsys.readouterr().err
    assert not dist.is_initialized()
    assert before == (FSDPParam.alloc_all_gather_outputs, dist.all_gather_into_tensor)
