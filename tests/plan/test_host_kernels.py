"""Plans for this CPU: what its kernels take besides outputs, and sums that PyTorch does in place."""

from __future__ import annotations

import pytest

from parametrized import parametrized

torch = pytest.importorskip("torch")

from step_bytes import measured_bytes

from stepscope.planner import host_kernels
from stepscope.planner.host_kernels import HostKernels
from stepscope.planner.prediction import Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

aten = torch.ops.aten
HEAD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {made}

    def forward(self, x):
        {run}

def build(batch: int = 8):
    return Model(), lambda: torch.randn(batch, {shape})
"""
MODELS = {
    # Gradients of parts of a tensor are added in place.
    "parts": (
        "self.first = nn.Linear(16, 16)",
        "y = self.first(x)\n        return sum(y[:, part].sin() for part in range(12)).square().mean()",
        "12, 16",
    ),
    # oneDNN copies images and weights into its own layout. The backward of a norm has a buffer of their size.
    "convolution": (
        "self.first, self.norm, self.last = nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20), nn.Conv2d(20, 8, 3)",
        "return self.last(self.norm(self.first(x)).relu()).square().mean()",
        "3, 20, 20",
    ),
    # oneDNN keeps more for the backward than its outputs.
    "recurrence": (
        "self.layers = nn.LSTM(24, 16, bidirectional=True)",
        "return self.layers(x)[0].square().mean()",
        "12, 24",
    ),
    # A loss that is a mean keeps the memory of what it is a mean of.
    "loss": (
        "self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)",
        "return nn.functional.mse_loss(self.last(self.first(x).relu()), x)",
        "50, 64",
    ),
    # A bias is added in place if the input is not contiguous.
    "bias": ("self.across = nn.Linear(40, 400)", "return self.across(x.transpose(1, 2)).mean()", "40, 32"),
}  # how it is made, how it runs, and the shape of one row of its batch


@parametrized("name", MODELS, quick=5)
@pytest.mark.parametrize("mode", ["forward+backward", "forward"])
def test_every_byte_of_a_step_on_this_cpu(name, mode, tmp_path):
    made, run, shape = MODELS[name]
    (tmp_path / "own.py").write_text(HEAD.format(made=made, run=run, shape=shape), encoding="utf-8")
    workload = f"{tmp_path}/own.py:build"
    grid = Grid(find(workload), {"device": "cpu"})
    point = grid.points([grid.words([f"mode={mode}"])], False)[0]

    predicted = Planner(find(workload)).predict(point, None)

    assert predicted.peak_allocated_bytes == measured_bytes(point)
    assert not [line for line in predicted.unmodelled if "scratch memory" in line]


def test_an_op_is_tried_once_and_its_outputs_are_the_cpus():
    """A CPU's statistics of a bfloat16 norm are bfloat16; a GPU's are float32."""
    kernels = HostKernels()
    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((6, 32), (32,)))
    arguments = (x, [32], weight, weight, 1e-5)

    outputs = kernels.outputs(aten.native_layer_norm.default, arguments, {})

    assert [(tuple(out.shape), out.dtype, out.device.type) for out in outputs] == [
        ((6, 32), torch.bfloat16, "meta"), ((6, 1), torch.bfloat16, "meta"), ((6, 1), torch.bfloat16, "meta"),
    ]  # fmt: skip
    assert kernels.scratch_bytes(aten.native_layer_norm.default, arguments, {}) == 0
    assert kernels.outputs(aten._unsafe_view.default, (x, [192]), {}) is NotImplemented  # shares memory


def test_what_cannot_be_tried_is_named(monkeypatch):
    kernels = HostKernels()
    image, filters = (torch.empty(shape, device="meta") for shape in ((2, 3, 8, 8), (4, 3, 3, 3)))
    shape = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    assert kernels.outputs(aten.convolution.default, (image, filters.double(), *shape), {}) is NotImplemented
    assert "convolution" in kernels.unknown and "cannot be tried here" in kernels.unknown["convolution"]

    monkeypatch.setattr(host_kernels, "MOST_BYTES", 100)
    again = HostKernels()
    assert again.scratch_bytes(aten.convolution.default, (image, filters, *shape), {}) == 0
    assert list(again.unknown) == ["convolution"]
