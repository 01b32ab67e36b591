"""`stepscope run` on a GPU writes down which back end attention took and, in PyTorch's words, why not flash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SOURCE = Path(__file__).parents[2] / "src"

SCRIPT = """
import sys, torch
from torch import nn
from torch.nn import functional as F

MASKED = sys.argv[1] == "mask"

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
    def forward(self, x, mask):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
    def forward(self, x):
        mask = None
        if MASKED:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[None, None]
            mask = mask.expand(x.shape[0], 1, -1, -1)
        for layer in self.layers:
            x = layer(x, mask)
        return x

model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(2, 1024, 256, device="cuda")
for _ in range(14):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def recorded(folder: Path, what: str) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    windows = ["--warmup", "3", "--clean", "4", "--trace", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "run", *windows, "-o", str(folder / "run"), "train.py", what],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_the_mask_is_named_by_pytorch_itself(tmp_path):
    facts = json.loads((recorded(tmp_path, "mask") / "recording.json").read_text())

    assert not [note for note in facts.get("notes") or [] if note["about"] == "attention"]
    entries = facts["attention"]
    assert [entry["module"] for entry in entries] == ["layers.0", "layers.1", "layers.2"]
    for entry in entries:
        assert (entry["device"], entry["dtype"], entry["mask"]) == ("cuda", "bfloat16", [2, 1, 1024, 1024])
        assert (entry["backend"] != "flash", entry["num_calls"]) == (True, 1)
        assert any("mask" in said.lower() for said in entry["refused"]["flash"]), entry["refused"]
        assert entry["caller"] == "train.py:14 forward"


def test_without_a_mask_flash_is_refused_nothing(tmp_path):
    facts = json.loads((recorded(tmp_path, "none") / "recording.json").read_text())

    for entry in facts["attention"]:
        assert entry["backend"] in ("flash", "cudnn")
        assert "flash" not in entry["refused"]


def test_the_report_of_a_fresh_run_names_the_mask(tmp_path):
    pytest.importorskip("polars")
    pytest.importorskip("msgspec")
    from stepscope.session import open_session
    from stepscope.session.reports import attention_report

    report = attention_report(open_session(recorded(tmp_path, "mask")).case)

    (row,) = report.rows
    assert (row.call["num_calls"], row.call["module"]) == (3.0, "layers.*")
    assert row.call["forward_ns"] > 0 < row.call["backward_ns"]
    first = row.reasons[0]
    assert (first.backend, first.source) == ("flash", "torch")
    assert "mask" in first.said.lower()
