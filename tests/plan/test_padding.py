"""Products that Inductor pads on a GPU: of tensor cores, with crooked rows; each is said."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.devices.limits import find_device
from stepscope.planner.compiled import inductor as padding
from stepscope.planner.compiled.graphs import ERROR_BAR, PADDED_ERROR_BAR
from stepscope.planner.prediction import Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

TOKENS, WIDTH = 4096, 512
HEAD = """
import torch
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn({words}, 512))

    def forward(self, x, y):
        return nn.functional.cross_entropy(x @ self.weight.t(), y)


def build():
    return Head(), lambda: {{"x": torch.randn(4096, 512), "y": torch.randint({words}, (4096,))}}
"""


def predicted(folder, words: int, dtype: str):
    path = folder / f"head_{words}.py"
    path.write_text(HEAD.format(words=words))
    workload = find(f"{path}:build")
    grid = Grid(workload, {"device": "cpu"})
    point = grid.points([grid.words(["compile=default", f"dtype={dtype}"])])[0]
    return Planner(workload).predict(point, find_device("NVIDIA H200"))


def note_of(plan) -> str:
    return next((note for note in plan.unmodelled if note.startswith("padded products")), "")


@pytest.mark.long
def test_the_gradient_of_crooked_logits_is_there_once_more(tmp_path, monkeypatch):
    padded = predicted(tmp_path, 5003, "bf16")
    monkeypatch.setattr(padding, "has_unaligned_rows", lambda *_: False)
    plain = predicted(tmp_path, 5003, "bf16")

    more = padded.peak_allocated_bytes - plain.peak_allocated_bytes
    # Inductor lays its rows out as multiples of 128 bytes; what was at the peak before may be gone at the new one.
    assert 0.8 < more / (TOKENS * 5056 * 2) <= 1
    assert (padded.error_bar, plain.error_bar) == (PADDED_ERROR_BAR, ERROR_BAR)
    assert f"5003 × {TOKENS} × {WIDTH}" in note_of(padded)
    assert note_of(plain) == ""


@pytest.mark.long
@pytest.mark.parametrize(("words", "dtype"), [(5008, "bf16"), (5003, "fp32")], ids=["straight rows", "float32"])
def test_what_is_not_padded_is_not_named(tmp_path, words, dtype):
    assert note_of(predicted(tmp_path, words, dtype)) == ""


def matrix(rows: int, columns: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (matrix(16384, 768), matrix(50257, 768).t(), True),  # the result's rows
        (matrix(16384, 50257), matrix(50257, 768), True),
        (matrix(16384, 50257).t(), matrix(16384, 768), True),
        (matrix(16383, 768), matrix(768, 3072), False),  # one row less, and all of them straight
        (matrix(1024, 16), matrix(16, 50257), False),  # bound by bandwidth: Inductor does not even ask
        (matrix(16384, 768, torch.float32), matrix(50257, 768, torch.float32).t(), False),
        (matrix(16384, 768, torch.float64), matrix(50257, 768, torch.float64).t(), False),
    ],
    ids=["result", "first", "transposed", "rows", "small", "float32", "float64"],
)
def test_what_the_benchmark_is_taken_to_say(first, second, expected):
    from torch._inductor.fx_passes import pad_mm

    before = {name: getattr(pad_mm, name, None) for name in padding.DECIDERS}
    with padding.Padding(find_device("NVIDIA H200"), is_tf32=False) as padded:
        decide = next(getattr(pad_mm, name) for name in padding.DECIDERS if hasattr(pad_mm, name))
        assert decide(None, first, second, torch.ops.aten.mm) is expected
    assert bool(padded.products) is expected
    assert {name: getattr(pad_mm, name, None) for name in padding.DECIDERS} == before


def test_tf32_runs_on_tensor_cores():
    single = torch.float32
    operands = matrix(16384, 768, single), matrix(50257, 768, single).t()
    with padding.Padding(find_device("NVIDIA H200"), is_tf32=True) as padded:
        assert padded._is_padded(None, *operands, torch.ops.aten.mm)
