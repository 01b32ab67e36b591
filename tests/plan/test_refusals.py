"""Programs that no plan can follow: each is told what it asks for, where, and what to do instead."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.devices.limits import find_device
from stepscope.errors import UsageError
from stepscope.planner.prediction import Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

PROGRAM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = {part}

    def forward(self, x):
        return ({result}).square().mean()


def build():
    return Model(), lambda: torch.randint(8, (4, 16))
"""


def predict(tmp_path, part, result, *words):
    path = tmp_path / "model.py"
    path.write_text(PROGRAM.format(part=part, result=result))
    workload = find(f"{path}:build")
    grid = Grid(workload, {"device": "cpu"})
    return Planner(workload).predict(grid.points([grid.words(list(words))])[0], find_device("NVIDIA H200"))


NESTED = "torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([self.part(x)[0], self.part(x)[1][:3]]), 0.0)"


@pytest.mark.parametrize(
    ("part", "result", "said"),
    [
        ("nn.Embedding(8, 4, sparse=True)", "self.part(x)", "sparse gradient .* at model.py:12 .* sparse=False"),
        ("nn.EmbeddingBag(8, 4, sparse=True)", "self.part(x)", "sparse gradient .* at model.py:12 .* sparse=False"),
        ("nn.DataParallel(nn.Embedding(8, 4))", "self.part(x)", "DataParallel at model.py:9 .* without it"),
        ("nn.Embedding(8, 4)", NESTED, "nested tensors at model.py:12 .* padded tensors"),
        ("nn.Embedding(8, 4)", "self.part(x).sum(0).to_sparse()", "sparse tensors at model.py:12 .* dense tensors"),
    ],
)
def test_what_cannot_be_planned_is_named_with_its_line_and_what_to_do(tmp_path, part, result, said):
    with pytest.raises(UsageError, match=said):
        predict(tmp_path, part, result)


def test_a_table_with_sparse_gradients_is_planned_where_none_are_made(tmp_path):
    found = predict(tmp_path, "nn.Embedding(8, 4, sparse=True)", "self.part(x)", "mode=inference")

    assert found.live_at_peak["parameter"] == 8 * 4 * 4


def test_a_file_without_a_function_is_told_what_to_write(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("")

    with pytest.raises(UsageError, match=r"plain.py:build. .*\(module"):
        find(str(path))
    for name in ("nofile.py", "nofile.py:build"):
        with pytest.raises(UsageError, match=f"^nofile.py not found in {tmp_path}: one of: plain.py"):
            find(f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("device", "word", "said"),
    [
        (None, "dtype=tf32", "tf32 needs an NVIDIA GPU"),
        ("Tesla T4", "dtype=tf32", "tf32 needs compute capability 8.0"),
        (None, "bf16_reduction=on", "bf16_reduction .*CUDA"),
        (None, "sdpa=cudnn", "sdpa=cudnn needs a CUDA device"),
        (None, "compile=reduce-overhead", "needs a CUDA device"),
    ],
)
def test_what_bench_cannot_run_is_not_planned(device, word, said):
    workload = find("cs336")
    grid = Grid(workload, {"device": "cpu"})
    point = grid.points([grid.words(["preset=tiny", word])])[0]

    with pytest.raises(UsageError, match=said):
        Planner(workload).predict(point, find_device(device) if device else None)
