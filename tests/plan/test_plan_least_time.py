"""The least time of a step by hand: one matrix, every FLOP and every byte."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.devices.limits import find_device
from stepscope.planner.prediction import Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

BATCH, WIDTH = 32, 256
PRODUCT = 2 * BATCH * WIDTH * WIDTH
WEIGHT = 4 * WIDTH * WIDTH
KEPT = 4 * BATCH * WIDTH  # the product, for the square's backward
SCALARS = range(17)  # and the loss, and the one that its gradient begins with

PROGRAM = f"""
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear({WIDTH}, {WIDTH}, bias=False)

    def forward(self, x):
        return self.matrix(x).square().sum()

def build():
    return Model(), lambda: torch.randn({BATCH}, {WIDTH})

class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100_000, {WIDTH})
        self.matrix = nn.Linear({WIDTH}, {WIDTH}, bias=False)

    def forward(self, x):
        return self.matrix(self.table(x)).square().sum()

def looked():
    return Looked(), lambda: torch.randint(100_000, ({BATCH},))

def loop(kind: str = "float32", zero: str = "start", conv: bool = False):
    dtype = getattr(torch, kind)
    model = nn.Conv1d(8, 8, 3, bias=False) if conv else nn.Linear({WIDTH}, {WIDTH}, bias=False)
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        if zero == "start":
            optimizer.zero_grad()
        shape = ({BATCH}, 8, {WIDTH}) if conv else ({BATCH}, {WIDTH})
        model(torch.randn(*shape, dtype=dtype, device=model.weight.device)).square().sum().backward()
        optimizer.step()
        if zero == "end":
            optimizer.zero_grad()

    return step
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "by_hand.py").write_text(PROGRAM)

    def predict(function, device="NVIDIA H200", **values):
        workload = find(f"{tmp_path}/by_hand.py:{function}")
        grid = Grid(workload, {"device": "cpu"})
        (point,) = grid.points([grid.words(f"{name}={value}" for name, value in values.items())])
        return Planner(workload).predict(point, find_device(device))

    return predict


@pytest.mark.parametrize(
    ("mode", "flops", "moved"),
    [
        ("inference", PRODUCT, WEIGHT),
        ("forward", PRODUCT, WEIGHT),
        # The input needs no gradient: one product. The weight read, its gradient written, what is kept both.
        ("forward+backward", 2 * PRODUCT, 2 * WEIGHT + 2 * KEPT),
        # The optimizer reads the gradient and the weight, and writes the weight.
        ("step", 2 * PRODUCT, 5 * WEIGHT + 2 * KEPT),
    ],
)
def test_flops_and_bytes_of_one_matrix(plan, mode, flops, moved):
    found = plan("build", mode=mode, optimizer="sgd")
    device = find_device("NVIDIA H200")

    assert found.flops == flops
    assert found.lower_bound.bytes - moved in SCALARS
    assert found.lower_bound.bandwidth_ms == found.lower_bound.bytes / device.bandwidth_bytes_per_s * 1e3
    assert found.lower_bound.compute_ms == pytest.approx(flops / device.peak_flops["fp32"] * 1e3)
    assert found.lower_bound.ms == max(found.lower_bound.bandwidth_ms, found.lower_bound.compute_ms)


def test_adam_reads_and_writes_two_numbers_more_for_each(plan):
    difference = plan("build").lower_bound.bytes - plan("build", optimizer="sgd").lower_bound.bytes

    assert 4 * WEIGHT <= difference <= 4 * WEIGHT + 64  # and counts its steps


def test_what_binds_is_what_takes_longer(plan):
    assert plan("build").lower_bound.binds == "bandwidth"
    slow = plan("build", device="NVIDIA GeForce RTX 4090", mode="inference", dtype="fp32").lower_bound
    assert slow.binds == ("compute" if slow.compute_ms > slow.bandwidth_ms else "bandwidth")
    busy = plan("loop", kind="float64", device="Tesla V100-SXM2-16GB").lower_bound
    assert busy.compute_ms == pytest.approx(2 * PRODUCT / 7.8e12 * 1e3)


def test_a_table_of_embeddings_is_not_read_whole(plan):
    assert plan("looked", mode="inference").lower_bound.bytes == WEIGHT


@pytest.mark.parametrize("zero", ["start", "end"])
def test_gradients_count_once_wherever_they_are_dropped(plan, zero):
    found = plan("loop", zero=zero)

    assert found.lower_bound.bytes - (5 * WEIGHT + 2 * KEPT) in SCALARS
    assert found.is_whole_step and found.unmodelled == ()


def test_a_dtype_without_a_peak_takes_one_that_is_no_slower_and_says_so(plan):
    found = plan("loop", kind="float64", device="NVIDIA L4")

    assert found.lower_bound.compute_ms == pytest.approx(2 * PRODUCT / 30.3e12 * 1e3)
    assert found.unmodelled == ("the table has no fp64 peak for NVIDIA L4: the least time uses fp32's peak",)


def test_tf32_is_what_the_program_allows(plan):
    peaks = find_device("NVIDIA H200").peak_flops
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        own = plan("loop").lower_bound.compute_ms
        points = plan("build").lower_bound.compute_ms
        old = plan("loop", device="Tesla V100-SXM2-16GB")  # it has no tf32
    finally:
        torch.set_float32_matmul_precision(before)

    assert own == pytest.approx(2 * PRODUCT / peaks["tf32"] * 1e3)
    assert points == pytest.approx(2 * PRODUCT / peaks["fp32"] * 1e3)
    assert plan("build", dtype="tf32").lower_bound.compute_ms == pytest.approx(own)
    assert old.lower_bound.compute_ms == pytest.approx(2 * PRODUCT / 15.7e12 * 1e3)


def test_convolutions_are_tf32_unless_the_program_forbids_it(plan):
    peaks = find_device("NVIDIA H200").peak_flops
    found = plan("loop", conv="true")

    assert found.lower_bound.compute_ms == pytest.approx(found.flops / peaks["tf32"] * 1e3)
