"""Compiled models that ask more of a compiler than products: a class token, dropout, convolutions, a causal mask."""

from __future__ import annotations

import json
import shutil

import pytest

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

from step_bytes import measured_bytes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from stepscope.devices.limits import find_device
from stepscope.planner.compiled.graphs import ERROR_BAR
from stepscope.planner.dataless_steps import trace
from stepscope.planner.hardware import hardware_of
from stepscope.planner.prediction import Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

H200 = "NVIDIA H200"
VISION = """
import torch
from torch import nn


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 64))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(64, 10)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = self.drop(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        return self.head(x[:, 0]).square().mean() + x.square().mean()


def build():
    return Vision(), lambda: torch.randn(64, 3, 32, 32)
"""
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def predicted(workload, device, *words):
    grid = Grid(find(workload), {"device": "cpu"})
    point = grid.points([grid.words(["compile=default", *words])])[0]
    return point, Planner(find(workload)).predict(point, find_device(device) if device else None)


@pytest.fixture
def vision(tmp_path):
    path = tmp_path / "vision.py"
    path.write_text(VISION)
    return f"{path}:build"


@pytest.fixture
def llama(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return f"hf:{path}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_vision_transformer_on_a_cpu(vision, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    point, found = predicted(vision, None)

    # Of what is kept Inductor chooses the layout: channels last.
    assert found.peak_allocated_bytes == pytest.approx(measured_bytes(point), rel=0.01)


def test_a_vision_transformer_on_a_gpu(vision):
    _, found = predicted(vision, H200)

    assert found.error_bar == ERROR_BAR
    assert found.live_at_peak["activation"] > 64 * 17 * 64 * 4


def test_a_program_that_asks_whether_it_is_compiled(llama):
    """transformers looks at positions only where it is not compiled."""
    _, found = predicted(llama, H200, "seq_len=64")

    assert found.live_at_peak["parameter"] == 4 * found.parameters
    assert not torch.compiler.is_compiling()


ATTENTION = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Linear(64, 192)

    def forward(self, x):
        query, key, value = self.make(x)[:, None].chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return nn.functional.dropout(mixed, 0.1).square().mean()


def build():
    return Attention(), lambda: torch.randn(2, 128, 64)
"""


def kernels_on_a_cpu():
    """The kernels that Python remembers for attention and dropout once they were traced where no plan is on."""

    def attend(x):
        return functional.dropout(functional.scaled_dot_product_attention(x, x, x), 0.1)

    with torch._dispatch.python.enable_python_dispatcher():
        make_fx(attend, tracing_mode="fake")(torch.randn(2, 1, 128, 64))
    aten = torch.ops.aten
    return [dict(op._dispatch_cache) for op in (aten.scaled_dot_product_attention.default, aten.dropout.default)]


def test_kernels_that_python_remembers_are_those_of_the_plan_or_of_the_host(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text(ATTENTION)
    workload = find(f"{path}:build")
    grid = Grid(workload, {"device": "cpu"})
    point = grid.points([grid.words(["compile=default", "dtype=bf16"])])[0]
    before = kernels_on_a_cpu()

    found = trace(workload, workload.config(), point.run, hardware_of(find_device(H200)))

    assert "cudnn_attention" in " ".join(entry["op"] for entry in found.memory["allocations"])
    assert kernels_on_a_cpu() == before
