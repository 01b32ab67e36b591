"""Plans of programs as people write them: asking for a GPU, loading on the host, logging, offloading, scaling."""

from __future__ import annotations

import json
import textwrap

import pytest

torch = pytest.importorskip("torch")

from stepscope.devices.limits import find_device
from stepscope.errors import UsageError
from stepscope.planner.prediction import Planner
from stepscope.recorder.ledger import storages
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

H200 = "NVIDIA H200"


def planned(name, device=H200, *words):
    workload = find(str(name))
    grid = Grid(workload, {"device": "cpu"})
    point = grid.points([grid.words(list(words))], False)[0]
    return Planner(workload).predict(point, None if device is None else find_device(device))


@pytest.fixture
def plan(tmp_path):
    def run(text, device=H200, *words):
        file = tmp_path / "train.py"
        file.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(text), encoding="utf-8")
        return planned(f"{file}:build", device, *words)

    return run


SCRIPT = """
    def build(offload: bool = False):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.cuda.manual_seed_all(0)
        model = nn.Sequential(*(nn.Linear(512, 512, device="cpu") for _ in range(4))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        data = torch.randn(8192, 512, device="cpu")
        kept = torch.autograd.graph.save_on_cpu(pin_memory=True) if offload else torch.enable_grad()

        def step():
            rows = torch.randint(8192, (4096,))
            x = data[rows].pin_memory().to(device, non_blocking=True)
            with kept:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            print(f"loss {loss.item():.3f}, {torch.cuda.max_memory_allocated() >> 20} MiB")

        return step
"""
WEIGHTS = 4 * (512 * 512 + 512) * 4
ROWS = 4096 * 512 * 4


def test_what_is_on_the_host_takes_nothing_of_the_gpu(plan, capsys):
    found = plan(SCRIPT)

    assert found.parameters == WEIGHTS / 4
    assert found.live_at_peak["parameter"] == WEIGHTS
    tensors = found.peak_allocated_bytes - found.live_at_peak["workspace"]
    assert 5 * ROWS < tensors < 9 * ROWS + 4 * WEIGHTS  # a batch, and not the data set, which is twice as large
    assert "loss nan" in capsys.readouterr().out
    (assumed,) = [text for text in found.unmodelled if "train.py" in text]
    assert ".item()" in assumed and "1.0" in assumed


@pytest.mark.long
def test_what_is_kept_on_the_host_for_backward_takes_nothing_of_the_gpu(plan):
    usual, offloaded = plan(SCRIPT), plan(SCRIPT, H200, "offload=true")

    assert usual.peak_allocated_bytes - offloaded.peak_allocated_bytes > 2 * ROWS


def test_on_a_cpu_there_is_no_gpu_and_all_is_in_one_memory(plan):
    found = plan(SCRIPT, None)

    assert found.live_at_peak["parameter"] == WEIGHTS
    assert found.peak_allocated_bytes > 8192 * 512 * 4 + 5 * ROWS


def test_no_allocation_is_dropped(plan, monkeypatch):
    monkeypatch.setattr(storages, "MAX_ALLOCATIONS", 20)

    assert plan(SCRIPT).live_at_peak["parameter"] == WEIGHTS


def test_a_program_that_decides_by_values_is_told_where(plan):
    with pytest.raises(UsageError, match=r"train\.py:8 step"):
        plan("""
            def build():
                weight = nn.Parameter(torch.randn(4))
                def step():
                    loss = weight.sum()
                    if loss > 3:
                        loss = loss * 2
                    loss.backward()
                return step
        """)


def test_a_step_that_fails_leaves_nothing_behind(plan):
    from torch.optim import optimizer as optimizers

    kept = []
    torch.kept = kept  # where the program can reach it
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    before = [dict(each) for each in hooks]
    try:
        with pytest.raises(ZeroDivisionError):
            plan("""
                def build():
                    model = nn.Linear(4, 4)
                    torch.kept.append(model)
                    def step():
                        model(torch.randn(2, 4, device="cuda"))
                        1 / 0
                    return step
            """)
    finally:
        del torch.kept
    (model,) = kept
    plain = torch.nn.Linear(4, 4)
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert model.__dict__.keys() - {"weight", "bias"} == plain.__dict__.keys() - {"weight", "bias"}
    assert model._compiled_call_impl is None
    assert [dict(each) for each in hooks] == before


def test_a_gradient_scaler_is_on_and_skips_no_step(plan):
    found = plan("""
        def build():
            model = nn.Linear(256, 256)
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            assert scaler.is_enabled()
            def step():
                optimizer.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(torch.randn(8, 256, device="cuda")).sum()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            return step
    """)

    assert found.live_at_peak["optimizer_state"] >= 2 * (256 * 256 + 256) * 4
    assert any("scaler" in text for text in found.unmodelled)


COMPILED = """
    @torch.compile
    def gelu(x):
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    def build():
        weight = nn.Parameter(torch.randn(64, 64))
        def step():
            gelu(weight).sum().backward()
        return step
"""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        pytest.param(COMPILED, "torch.compile", marks=pytest.mark.long),
        ("def build():\n return nn.Conv2d(3, 8, 3), lambda: torch.randn(2, 3, 16, 16)", "convolution"),
        ("def build():\n return nn.LSTM(8, 8), lambda: torch.randn(4, 2, 8)", "lstm"),
        ("def build():\n return nn.GRU(8, 8), lambda: torch.randn(4, 2, 8)", "gru"),
        (
            "class Fourier(nn.Linear):\n"
            " def forward(self, x): return torch.fft.rfft(super().forward(x), n=131).abs()\n"
            "def build():\n return Fourier(8, 8), lambda: torch.randn(4, 8)",
            "_fft_r2c",
        ),
        (
            "from torch.nn.attention.flex_attention import flex_attention\n"
            "class Attend(nn.Linear):\n"
            " def forward(self, x):\n"
            "  x = super().forward(x)\n"
            "  return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + i - j)\n"
            "def build():\n return Attend(16, 16), lambda: torch.randn(1, 2, 128, 16)",
            "flex_attention",
        ),
    ],
    ids=["compile", "conv", "lstm", "gru", "fft", "flex"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_what_is_not_planned_as_it_would_run_is_named(plan, text, named):
    assert any(line.startswith(f"{named}:") for line in plan(text).unmodelled)


@pytest.mark.long
def test_a_hugging_face_model_on_a_cpu(tmp_path):
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "vocab_size": 1000, "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(config), encoding="utf-8")

    on_cpu, on_gpu = (planned(f"hf:{file}", device) for device in (None, H200))

    assert on_cpu.live_at_peak["parameter"] == on_gpu.live_at_peak["parameter"] == 4 * on_cpu.parameters


def test_a_program_hears_the_name_of_the_planned_device(plan):
    asks = """
        def build():
            assert torch.cuda.get_device_capability() == (8, 9) and torch.cuda.get_device_name() == "NVIDIA L4"
            assert torch.cuda.get_device_properties(0).total_memory < 25e9 and torch.cuda.is_bf16_supported()
            assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
            return nn.Linear(4, 4), lambda: torch.randn(4, 4)
    """

    assert plan(asks, "NVIDIA L4").parameters == 20
