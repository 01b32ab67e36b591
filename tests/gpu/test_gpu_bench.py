"""`stepscope bench` on a real GPU: device times, out of memory, proofs by kernels, compile modes, fork after import.

Run with `python -m pytest tests/gpu -m gpu`.
"""

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

WORKLOADS = """
import torch
from torch import nn
from torch.nn import functional

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(256, 768)
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().mean()

def attention(batch: int = 8, seq_len: int = 1024):
    return Attention(), lambda: torch.randn(batch, seq_len, 256), batch * seq_len

class Products(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)
    def forward(self, x):
        for _ in range(4):
            x = x @ self.weight
        return x.float().square().mean()

def products(size: int = 8192):
    return Products(size), lambda: torch.randn(size, size), size

class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return (x.expand(-1, 64 << 20) * self.weight).square().mean()

def hungry(batch: int = 1):
    return Hungry(), lambda: torch.ones(batch, 1), batch
"""


@pytest.fixture
def bench(tmp_path):
    def run(function, *words):
        (tmp_path / "mine.py").write_text(WORKLOADS)
        folder = tmp_path / f"sweep{len(list(tmp_path.iterdir()))}"
        command = [sys.executable, "-m", "stepscope", "bench", f"mine.py:{function}", "--device", "cuda"]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        done = subprocess.run(
            [*command, *words, "-o", str(folder)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        return rows, done.stdout, folder

    return run


def median(values):
    return sorted(values)[len(values) // 2]


def test_device_time_is_that_of_the_products_and_mfu_is_sane(bench):
    rows, out, _ = bench("products", "--mode", "forward+backward", "--dtype", "bf16,tf32,fp32")

    assert [row["status"] for row in rows] == ["ok"] * 3, [row["reason"] for row in rows]
    for row in rows:
        flops = row["flops_counted"]
        # The input needs no gradient: four products forward, seven backward.
        assert flops == 11 * 2 * 8192**3
        assert row["flops_counted_by_dtype"] == {row["run"]["dtype"]: flops}
        # All of the traced pass but its beginning. The samples are no measure of it: bf16 products reach the limit of
        # power within a few passes (16.8 ms becomes 19.1 ms).
        assert 0 <= row["traced_ns"] - row["gpu_busy_ns"] < 10_000_000
    times = [median(row["samples_device_ns"]) for row in rows]
    assert times[0] < times[1] < times[2]
    rate = rows[0]["flops_counted"] / (times[0] / 1e9)
    assert 3e14 < rate < 989.4e12
    # Nothing waits between the steps: the host is done long before the device.
    assert min(rows[2]["samples_host_ns"]) < times[2] / 5
    assert "MFU" in out


def test_a_real_out_of_memory_is_a_row_and_the_grid_goes_on(bench):
    rows, out, _ = bench("hungry", "--mode", "forward+backward", "--set", "batch=1,4096,2")

    assert [row["status"] for row in rows] == ["ok", "oom", "ok"]
    oom = rows[1]["oom"]
    assert oom["asked_bytes"] >= 1 << 40 and 0 < oom["free_bytes"] < oom["total_bytes"] < 1 << 40
    assert "oom: needed 1.00 TiB" in out
    first = rows[0]
    assert first["peak_reserved_bytes"] >= first["peak_allocated_bytes"] > first["before_backward_bytes"] > 256 << 20


def test_the_largest_batch_of_a_budget(bench):
    rows, _, _ = bench("hungry", "--mode", "forward+backward", "--steps", "2", "--max-batch", "8GiB")

    (row,) = rows
    assert row["status"] == "ok" and row["peak_reserved_bytes"] <= 8 << 30
    # 256 MiB a tensor and item, between two and five of them at once.
    assert 6 <= row["max_batch"] <= 16
    assert {entry["status"] for entry in row["tries"]} == {"ok", "oom"}


def test_forced_back_ends_show_their_kernels(bench):
    rows, _, folder = bench(
        "attention",
        "--dtype",
        "bf16",
        "--sdpa",
        "free,flash,efficient,math,cudnn",
        "--mode",
        "forward+backward",
        "--trace",
    )

    by_name = {row["run"]["sdpa"]: row for row in rows}
    for name in ("flash", "efficient", "math"):
        assert by_name[name]["status"] == "ok", by_name[name]["reason"]
        assert by_name[name]["proofs"][f"sdpa={name}"]
        assert 5 < by_name[name]["num_kernel_launches"] < 500
        assert by_name[name]["num_kernels"] > 5
        assert (folder / by_name[name]["trace"]).stat().st_size > 1000
    assert by_name["cudnn"]["status"] in ("ok", "skipped"), by_name["cudnn"]["reason"]
    assert by_name["math"]["peak_allocated_bytes"] > by_name["flash"]["peak_allocated_bytes"]
    losses = [row["loss"] for row in rows if row["status"] == "ok"]
    assert max(losses) == pytest.approx(min(losses), rel=1e-2)


def test_fp32_cannot_take_flash(bench):
    rows, _, _ = bench("attention", "--sdpa", "flash", "--mode", "forward")
    assert rows[0]["status"] == "skipped" and "sdpa=flash" in rows[0]["reason"]


def test_compile_modes_are_proven_and_timed_apart(bench):
    modes = "off,default,reduce-overhead,max-autotune-no-cudagraphs"
    rows, _, _ = bench("attention", "--dtype", "autocast_bf16", "--compile", modes, "--optimizer", "fused")

    assert [row["status"] for row in rows] == ["ok"] * 4, [row["reason"] for row in rows]
    for row in rows[1:]:
        assert row["compile_ns"] > 0 and row["first_call_ns"] > 20 * median(row["samples_device_ns"])
        assert row["compiler"]["compiler.num_graphs"] >= 1
    assert "CUDA graph" in rows[2]["proofs"]["compile=reduce-overhead"]
    assert rows[2]["compiler"]["compiler.num_cuda_graphs"] >= 1
    assert "_fused_adamw" in rows[0]["proofs"]["optimizer=fused"]


def test_a_fork_of_the_server_and_a_spawned_point_agree(bench):
    forked, _, _ = bench("attention", "--dtype", "bf16", "--start", "fork")
    spawned, _, _ = bench("attention", "--dtype", "bf16", "--start", "spawn")

    assert (forked[0]["status"], spawned[0]["status"]) == ("ok", "ok")
    assert forked[0]["loss"] == spawned[0]["loss"]


def test_fp16_autocast_trains_with_a_scaler(bench):
    rows, _, _ = bench("attention", "--dtype", "autocast_fp16", "--mode", "step")
    assert rows[0]["status"] == "ok" and rows[0]["final_loss"] < rows[0]["loss"]


def test_the_gate_passes_every_cs336_variant_in_every_dtype(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = ["--preset", "tiny", "--set", "attention=naive,builtin,sdpa", "--dtype", "fp32,tf32,bf16,autocast_fp16"]
    command = [sys.executable, "-m", "stepscope", "bench", "cs336", *words, "--device", "cuda", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert json.loads(done.stdout)["num_by_status"] == {"ok": 12}, done.stderr
