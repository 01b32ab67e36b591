"""Plans of compiled programs: against what torch.compile really allocates on this CPU, and what they refuse."""

from __future__ import annotations

import shutil

import pytest

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

from step_bytes import measured_bytes

from stepscope.devices.limits import find_device
from stepscope.errors import UsageError
from stepscope.planner.compiled.graphs import ERROR_BAR
from stepscope.planner.prediction import Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

MODEL = """
import torch
import torch.utils.checkpoint
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        {line}
        return (x + self.down(torch.nn.functional.gelu(self.up(x)))).square().mean()


def build():
    return Model(), lambda: {{"x": torch.randn(1024, 64)}}
"""


CHECKPOINT = """
        for _ in range(4):
            x = torch.utils.checkpoint.checkpoint(lambda y: self.down(self.up(y).exp()).sin(), x, use_reentrant=False)
"""


def point_of(workload, *words):
    grid = Grid(find(workload), {"device": "cpu"})
    return grid.points([grid.words(list(words))])[0]


def predicted(point, device=None):
    return Planner(find(point.workload)).predict(point, find_device(device) if device else None)


@pytest.fixture
def source(tmp_path):
    def write(line="pass"):
        path = tmp_path / "model.py"
        path.write_text(MODEL.format(line=line))
        return f"{path}:build"

    return write


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("line", ["pass", CHECKPOINT], ids=["plain", "checkpointed"])
def test_on_a_cpu(line, source, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    point = point_of(source(line), "compile=default")

    found = predicted(point)

    # Measured after the plan: nothing of it may be left in what torch.compile does next.
    assert found.peak_allocated_bytes == pytest.approx(measured_bytes(point), rel=0.01)
    assert sum(found.live_at_peak.values()) == found.peak_allocated_bytes


def test_on_a_device_that_is_not_there(source):
    compiled = predicted(point_of(source(), "compile=default"), "NVIDIA H200")
    eager = predicted(point_of(source()), "NVIDIA H200")

    assert compiled.flops == eager.flops
    assert compiled.live_at_peak["parameter"] == eager.live_at_peak["parameter"]
    assert compiled.live_at_peak["workspace"] == eager.live_at_peak["workspace"]
    assert compiled.peak_allocated_bytes < eager.peak_allocated_bytes
    assert compiled.error_bar == ERROR_BAR
    assert eager.error_bar is None
    assert any(note.startswith("compiled: an approximation") for note in compiled.unmodelled)


def test_torch_compile_is_itself_again(source):
    before = torch.compile
    predicted(point_of(source(), "compile=default"), "NVIDIA H200")

    assert torch.compile is before
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_other_modes_are_refused(source, mode):
    with pytest.raises(UsageError, match=f"compile={mode}: .*default mode"):
        predicted(point_of(source(), f"compile={mode}"), "NVIDIA H200")


def test_a_program_that_looks_at_data_is_named(source):
    with pytest.raises(UsageError, match=r"compile: .* cannot be planned as one graph \(model.py:13: .* measure it"):
        predicted(point_of(source("x = x + 1 if x.sum() > 0 else x"), "compile=default"), "NVIDIA H200")
