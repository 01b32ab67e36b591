"""Memory that a plan cannot count is allowed for in the verdict, or at least said: cuDNN's, and the host's."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from stepscope.devices.limits import find_device
from stepscope.planner.hardware import CONTEXT_BYTES
from stepscope.planner.prediction import FITS, MARGIN, TOO_CLOSE, Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

H200 = find_device("NVIDIA H200")
CONVOLUTION = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Conv2d(64, 64, 3, padding=1, bias=False)

    def forward(self, x):
        return self.part(x).square().mean()


def build():
    return Model(), lambda: torch.randn(32, 64, 256, 256)
"""
ON_HOST = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu(pin_memory={pin}):
            x = self.parts[1](self.parts[0](x).sigmoid())
        return x.mean()


def build():
    return Model(), lambda: torch.randn(4096, 256)
"""


def planner_of(tmp_path, text):
    path = tmp_path / "model.py"
    path.write_text(text)
    workload = find(f"{path}:build")
    return Planner(workload), Grid(workload, {"device": "cpu"}).points([{}])[0]


def test_a_verdict_allows_for_the_workspace_of_convolutions(tmp_path):
    planner, point = planner_of(tmp_path, CONVOLUTION)
    found = planner.predict(point, H200)
    tensors = 2 * 4 * 32 * 64 * 256 * 256  # the input and the output; the weights are small
    need = found.peak_reserved_bytes / (1 - MARGIN) + CONTEXT_BYTES

    def verdict(visible_bytes):
        return planner.predict(point, dataclasses.replace(H200, visible_bytes=int(visible_bytes))).fits

    assert verdict(need + 1.1 * tensors) == FITS
    assert verdict(need + 0.5 * tensors) == TOO_CLOSE
    assert any(note.startswith("the verdict reserves 1,024") for note in found.unmodelled)
    assert "convolution: cuDNN's workspace is not counted" in found.unmodelled


def test_a_program_without_convolutions_is_allowed_nothing(tmp_path):
    planner, point = planner_of(tmp_path, ON_HOST.format(pin=False))

    assert not [note for note in planner.predict(point, H200).unmodelled if "allows" in note]


@pytest.mark.parametrize("pin", [True, False])
def test_what_is_kept_on_the_host_is_said(tmp_path, pin):
    planner, point = planner_of(tmp_path, ON_HOST.format(pin=pin))
    kept = 4096 * 256 * 4  # the input, what the sigmoid gives, once for it and once for the layer after it
    weights = 256 * 256 * 4  # of the second layer

    said = [note for note in planner.predict(point, H200).unmodelled if note.startswith("save_on_cpu: keeps")]

    assert len(said) == 1
    assert said[0].startswith(f"save_on_cpu: keeps up to {(3 * kept + weights) / 2**20:,.1f} MiB")
