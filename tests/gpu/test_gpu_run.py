"""`stepscope run` on a real GPU: phases, MFU, counters, trace, compilers, trainers.

Run with `python -m pytest tests/gpu -m gpu`; docs/results/ has what it proved, and where.
"""

from __future__ import annotations

import gzip
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

GPT = (Path(__file__).parents[2] / "examples" / "train_gpt.py").read_text()

MATMULS = """
import torch
from torch import nn

N, NUM = 8192, 8
class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(N, N, device="cuda", dtype=torch.bfloat16) / N**0.5)
    def forward(self, x):
        for _ in range(NUM):
            x = x @ self.w
        return x

model = Products()
x = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
times = []
with torch.no_grad():
    for _ in range(60):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        model(x)
        end.record()
        times.append((begin, end))
torch.cuda.synchronize()
own = sorted(b.elapsed_time(e) for b, e in times[5:25])
print("OWN_MS", own[len(own) // 2])
"""

SLEEPS = """
import json, statistics, time, torch
from torch import nn

slept = {"data": [], "forward": [], "backward": [], "optimizer": []}
def sleep(name, seconds):
    began = time.perf_counter()
    time.sleep(seconds)
    slept[name].append((time.perf_counter() - began) * 1e3)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        sleep("forward", 0.03)
        return x * 1
    @staticmethod
    def backward(ctx, g):
        sleep("backward", 0.05)
        return g

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        return Slow.apply(self.layer(x))

class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        sleep("optimizer", 0.02)
        return super().step(closure)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        sleep("data", 0.04)
        return torch.randn(64)

model = Model().cuda()
optimizer = SlowSGD(model.parameters(), lr=1e-3)
for x in torch.utils.data.DataLoader(Data(), batch_size=1):
    loss = model(x.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("SLEPT", json.dumps({name: statistics.median(values[5:25]) for name, values in slept.items()}))
"""

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=512, n_positions=64)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * 2 * 40
    def __getitem__(self, i):
        ids = torch.randint(0, 512, (64,))
        return {"input_ids": ids, "labels": ids}
arguments = TrainingArguments(
    output_dir="out", max_steps=40, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    bf16=True, report_to=[], save_strategy="no", logging_steps=1000, dataloader_num_workers=2,
)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Data()).train()
"""

LIGHTNING = """
import torch
try:
    import lightning as L
except ImportError:
    import pytorch_lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    def training_step(self, batch, _):
        return self.model(batch[0]).square().mean()
    def validation_step(self, batch, _):
        self.model(batch[0])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(640, 64)), batch_size=16)
L.Trainer(max_steps=40, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
          enable_progress_bar=False).fit(Module(), data, data)
"""


def run(tmp_path, text, *arguments, options=()):
    script = tmp_path / "script.py"
    script.write_text(text)
    folder = tmp_path / "recording"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stepscope",
            "run",
            "--json",
            "-o",
            str(folder),
            *options,
            str(script),
            *arguments,
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), folder, done.stderr


def steps_of(folder):
    steps = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        values = json.loads(line)
        steps.clear() if "restart" in values else steps.setdefault(values["step"], {}).update(values)
    return steps


def check_sums(card, folder):
    """Host phases sum to the step exactly; device phases to the step on the device within 1 % of the host's."""
    clean = [s for s in steps_of(folder).values() if s["window"] == "clean"]
    assert len(clean) == 20
    for step in clean:
        assert sum(step["host_ns"].values()) == step["wall_ns"]
    device = sum(sum(step["device_ns"].values()) for step in clean)
    first, last = clean[0], clean[-1]
    elapsed = last["start_ns"] + last["wall_ns"] - first["start_ns"]
    assert abs(sum(row["share"] for row in card["rows"]) - 1) < 1e-9
    return device / elapsed


def test_gpt_card_is_complete(tmp_path):
    card, folder, _ = run(tmp_path, GPT, "--steps", "45")
    covered = check_sums(card, folder)
    assert 0.97 < covered < 1.03
    assert card["clock"] == "device"
    assert card["throughput"]["unit"] == "tokens" and card["throughput"]["per_step"] == 16 * 1024
    assert card["environment"]["device"] == "cuda"
    assert set(card["flops"]["model_flops_by_dtype"]) == {"bf16"}
    assert 0.9 < card["flops"]["model_flops"] / card["flops"]["formula_flops"] < 1.1
    assert 0 < card["mfu"]["share"] < 1
    assert card["memory"]["peak_allocated_bytes"] <= card["memory"]["peak_reserved_bytes"]
    assert card["memory"]["peak_reserved_bytes"] <= card["memory"]["driver_used_bytes"]
    assert card["counters"]["gpu_busy_share"]["mean"] > 0.3
    assert card["num_kernels_per_step"] > 100
    assert {row["name"] for row in card["rows"]} >= {
        "forward",
        "backward",
        "optimizer",
        "idle",
        "unattributed",
    }
    trace = folder / "trace" / "rank0.json.gz"
    assert trace.stat().st_size < 16 * 2**20
    with gzip.open(trace) as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    assert "stepscope.module/blocks.3.qkv" in names and "ProfilerStep#26" in names
    losses = [s["loss"] for s in steps_of(folder).values() if "loss" in s]
    assert len(losses) >= 25 and losses[-1] < losses[0]


def test_mfu_of_known_products_is_flops_over_time_over_peak(tmp_path):
    card, _, stderr = run(tmp_path, MATMULS)
    flops = 8 * 2 * 8192**3
    assert card["flops"]["model_flops"] == card["flops"]["hardware_flops"] == flops
    device = card["environment"]["device_name"]
    from stepscope.devices import find_device

    peak = find_device(device).peak_flops["bf16"]
    seconds = card["step_ns"]["median"] / 1e9
    assert card["mfu"]["share"] == pytest.approx(flops / seconds / peak, rel=1e-12)
    own_ms = float(stderr.split("OWN_MS")[1].split()[0])
    assert card["step_ns"]["median"] / 1e6 == pytest.approx(own_ms, rel=0.02)


def test_known_sleeps_are_reported_right(tmp_path):
    card, folder, stderr = run(tmp_path, SLEEPS)
    check_sums(card, folder)
    phases = {phase["name"]: phase["host_ns"] / 1e6 for phase in card["phases"]}
    slept = json.loads(stderr.split("SLEPT")[1].splitlines()[0])
    # Beside its sleep each phase launches a few kernels: some tenths of a millisecond.
    for name, slept_ms in slept.items():
        assert slept_ms * 0.98 <= phases[name] < slept_ms * 1.02 + 0.6, (phases, slept)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_compiled(tmp_path, mode):
    script = GPT.replace("torch.compile(model)", f'torch.compile(model, mode="{mode}")')
    script = script.replace("(8192, 1024, 16, 16)", "(1024, 256, 2, 4)").replace("1024 if on_gpu", "256 if on_gpu")
    card, folder, _ = run(tmp_path, script, "--compile", "--steps", "45")
    check_sums(card, folder)
    assert card["compiler"]["num_compiles"] >= 1 and card["compiler"]["compile_seconds"] > 0
    assert card["compiler"]["recompiles"] == [] and card["compiler"]["graph_breaks"] == []
    if mode == "default":
        assert card["flops"]["hidden"] is None and card["mfu"]["share"] > 0
    if mode == "reduce-overhead":
        assert card["compiler"]["cuda_graphs"]["num_recorded"] >= 1
        assert "CUDA graphs" in card["flops"]["hidden"]
    assert not [note for note in card["notes"] or [] if note["about"] == "recorder"], card["notes"]


def test_trainer(tmp_path):
    card, folder, _ = run(tmp_path, TRAINER)
    check_sums(card, folder)
    assert card["num_micro_batches"] == 2
    assert card["throughput"]["per_step"] == 8 * 2 * 64
    assert len(steps_of(folder)) == 40


def test_lightning(tmp_path):
    card, folder, _ = run(tmp_path, LIGHTNING)
    check_sums(card, folder)
    assert len(steps_of(folder)) == 40
    named = {phase["name"]: phase["host_ns"] for phase in card["phases"]}
    assert all(named[name] > 0 for name in ("data", "forward", "backward", "optimizer"))


def test_no_synchronization_is_added(tmp_path):
    """torch raises at every synchronizing call once told to: a clean step must pass."""
    text = """
import torch
from torch import nn
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(64, 256, device="cuda")
for i in range(60):
    if i == 6:
        torch.cuda.set_sync_debug_mode("error")
    if i == 24:
        torch.cuda.set_sync_debug_mode("default")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    card, _, _ = run(tmp_path, text)
    assert card["num_clean"] == 20
    assert not card["notes"]


DYNAMIC = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
fast = torch.compile(model, mode="reduce-overhead", dynamic=True)

@torch.compile(mode="reduce-overhead")
def skipped(x):
    x.add_(1)  # an input that is changed: no CUDA graph
    return x * 2

optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(60):
    x = torch.randn((8, 16, 24)[i % 3], 64, device="cuda")
    torch.compiler.cudagraph_mark_step_begin()
    y = fast(x)
    skipped(y.detach().clone())
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_cuda_graphs_skips_and_sizes_are_told(tmp_path):
    card, _, _ = run(tmp_path, DYNAMIC)
    compiler = card["compiler"]
    assert compiler["cuda_graphs"]["num_distinct_sizes"] == 3, compiler
    reasons = [skip["reason"] for skip in compiler["cuda_graph_skips"]]
    assert any("mutated inputs" in reason and "script.py:10" in reason for reason in reasons), reasons
    assert compiler["compile_seconds"] > 0


LOSS_INSIDE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        return (self.layers(x) - x).square().mean()

torch.manual_seed(0)
model = Model().cuda()
fast = torch.compile(model, mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 64, device="cuda")
own = []
for i in range(60):
    torch.compiler.cudagraph_mark_step_begin()
    loss = fast(x)
    own.append(loss.detach().clone())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("OWN", torch.stack(own).tolist())
"""


def test_a_loss_that_the_next_cuda_graph_overwrites_is_read(tmp_path):
    card, folder, stdout = run(tmp_path, LOSS_INSIDE)
    assert not [note for note in card["notes"] or [] if note["about"] == "recorder"], card["notes"]
    assert card["compiler"]["cuda_graphs"]["num_recorded"] >= 1
    assert (folder / "trace" / "rank0.json.gz").is_file()
    own = json.loads(stdout.split("OWN")[1].splitlines()[0])
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert len(losses) > 20 and all(loss == own[step] for step, loss in losses.items())


CHECKPOINTED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
        self.layers = nn.ModuleList(nn.Sequential(*layers[i : i + 2]) for i in (0, 2))
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if CHECKPOINT else layer(x)
        return x

model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(256, 512, device="cuda", requires_grad=True)
for _ in range(40):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_checkpointing_and_autocast_are_counted_apart(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, folder, _ = run(tmp_path / "a", f"CHECKPOINT = False\n{CHECKPOINTED}")
    again, _, _ = run(tmp_path / "b", f"CHECKPOINT = True\n{CHECKPOINTED}")
    one_pass = 4 * 2 * 256 * 512 * 512
    assert plain["flops"]["model_flops_by_dtype"] == {"bf16": 3 * one_pass}
    assert again["flops"]["model_flops"] == 3 * one_pass
    # A checkpointed forward stops as soon as it has what backward needs: each pair's first layer.
    assert (plain["flops"]["recomputed_flops"], again["flops"]["recomputed_flops"]) == (0, one_pass // 2)
    with gzip.open(folder / "memory.json.gz") as stream:
        allocations = json.load(stream)["allocations"]
    casts = sum(a["bytes"] for a in allocations if a["owner"] == "autocast_weight_cast")
    assert casts == 4 * 512 * 512 * 2  # half of the float32 weights
