"""The changes of `stepscope improve` on real torch objects: what each changes, and that looking changes nothing."""

from __future__ import annotations

import os
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from stepscope.api.improve_order import TRIES
from stepscope.findings.fixes import FIXES, code_of
from stepscope.recorder import fixes as variables
from stepscope.recorder.model import is_compiled


def facts(fixes, name):
    return next(each for each in fixes.finish() if each["id"] == name)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.strides = []

    def forward(self, x):
        self.strides.append(x.stride())
        return self.head(self.conv(x).mean((2, 3)))


def trained(apply, text, num_steps=4, optimizer_of=torch.optim.AdamW):
    """Return the model, its losses and the fixes after some steps; the roots are known after the second."""
    fixes = apply(text) if text else None
    torch.manual_seed(0)
    model = Images()
    optimizer = optimizer_of(model.parameters(), lr=0.1)
    losses = []
    for step in range(num_steps):
        if step == 2 and fixes is not None:
            fixes.use_roots([model])
        loss = model(torch.arange(2 * 3 * 5 * 5.0).view(2, 3, 5, 5) / 150).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses, fixes


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, fused=True)])
def test_convolutions_their_images_and_their_optimizer_states_become_channels_last(apply, kind):
    _, _, plain, _ = trained(apply, "", optimizer_of=kind)
    model, optimizer, losses, fixes = trained(apply, "memory_layout", optimizer_of=kind)

    weight, wanted = model.conv.weight, torch.channels_last
    assert weight.is_contiguous(memory_format=wanted) and not weight.is_contiguous()
    states = [value for value in optimizer.state[weight].values() if value.dim() == 4]
    assert states and all(value.stride() == weight.stride() for value in states)
    assert model.strides[1] == (75, 25, 5, 1) and model.strides[2] == (75, 1, 15, 3)
    assert facts(fixes, "memory_layout")["changed"] == {"convolutions of Images channels last": 1}
    assert losses == pytest.approx(plain, rel=1e-5)


def test_a_model_without_convolutions_and_one_that_is_channels_last_are_left(apply):
    fixes = apply("memory_layout")
    fixes.use_roots([nn.Linear(2, 2), Images().to(memory_format=torch.channels_last)])

    left = facts(fixes, "memory_layout")["left"]
    assert left == {"Linear has no 2-D convolution": 1, "Images is channels last already": 1}


class Switchable(nn.Module):
    def __init__(self, now="eager", refuses=False):
        super().__init__()
        self.config, self.refuses = types.SimpleNamespace(_attn_implementation=now), refuses

    def set_attn_implementation(self, name):
        if self.refuses:
            raise ValueError("no sdpa here\nsecond line")
        self.config._attn_implementation = name


def test_a_models_own_switch_is_set_to_sdpa(apply):
    fixes = apply("sdpa")
    model, ready, refusing = Switchable(), Switchable("flash_attention_2"), Switchable(refuses=True)
    fixes.use_roots([model, ready, refusing, nn.Linear(1, 1)])

    assert model.config._attn_implementation == "sdpa"
    found = facts(fixes, "sdpa")
    assert found["changed"] == {"Switchable with sdpa attention instead of eager": 1}
    assert found["left"] == {
        "Switchable uses flash_attention_2 attention already": 1,
        "Switchable refused sdpa: no sdpa here": 1,
        "Linear has no switch for its attention": 1,
    }


def test_transformers_has_the_switch_and_its_loss_stays(apply):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    tokens = torch.arange(8)[None]
    before = model(tokens, labels=tokens).loss.item()

    fixes = apply("sdpa")
    fixes.use_roots([model])

    assert facts(fixes, "sdpa")["changed"] and model.config._attn_implementation == "sdpa"
    calls = []
    original = F.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = lambda *a, **k: calls.append(1) or original(*a, **k)
    try:
        assert model(tokens, labels=tokens).loss.item() == pytest.approx(before, rel=1e-5)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    assert calls


def test_threads_are_set_also_if_the_script_sets_others(apply, monkeypatch):
    before = torch.get_num_threads()
    fixes = apply("threads=3")
    torch.set_num_threads(1)
    fixes.use_roots([nn.Linear(1, 1)])

    found = facts(fixes, "threads")
    assert torch.get_num_threads() == 3 and found["changed"] == {"torch uses 3 threads instead of 1": 1}
    assert found["value"] == "3"
    fixes.remove()
    assert torch.get_num_threads() == before


def test_fewer_threads_are_set_only_if_asked_for(apply, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    fixes = apply("threads=2")
    fixes.use_roots([nn.Linear(1, 1)])
    assert torch.get_num_threads() == 2
    assert facts(fixes, "threads")["changed"] == {"torch uses 2 threads instead of 3": 1}
    fixes.remove()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fixes = apply("threads")
    fixes.use_roots([nn.Linear(1, 1)])
    assert facts(fixes, "threads")["left"] == {"torch uses 3 threads already": 1}
    fixes.remove()
    torch.set_num_threads(before)


def test_rounding_moves_weights_by_less_than_half_a_unit_and_leaves_the_random_numbers(apply):
    _, _, plain, _ = trained(apply, "")
    state = torch.get_rng_state()
    _, _, losses, fixes = trained(apply, "rounding=bf16")

    assert losses[:2] == plain[:2] and losses[2] != plain[2] and losses[2] == pytest.approx(plain[2], rel=0.05)
    assert torch.equal(torch.get_rng_state(), state) and facts(fixes, "rounding")["changed"]


def test_a_setting_of_cudnn_without_a_gpu_finds_nothing(apply):
    before = torch.backends.cudnn.benchmark
    fixes = apply("cudnn_benchmark")
    fixes.use_roots([Images()])

    assert torch.backends.cudnn.benchmark and facts(fixes, "cudnn_benchmark")["changed"] == {}
    fixes.remove()
    assert torch.backends.cudnn.benchmark is before


def test_the_allocators_variable_is_set_before_torch_unless_the_user_sets_it(monkeypatch):
    for name in variables.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    variables.set_variables("?expandable_segments")
    variables.set_variables("autocast")
    assert variables.ALLOCATOR_VARIABLES[0] not in os.environ
    variables.set_variables("autocast+expandable_segments")
    assert os.environ[variables.ALLOCATOR_VARIABLES[0]] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    variables.set_variables("expandable_segments")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_looking_counts_what_would_change_and_changes_nothing(apply):
    _, _, plain, _ = trained(apply, "")
    names = [text for text in TRIES if not text.startswith(("compile=", "launch_bound"))]
    model, optimizer, losses, fixes = trained(apply, "?" + "+".join(names))
    loader = DataLoader(list(range(8)))
    fixes.use_roots([Switchable()])
    F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8)] * 3)

    assert losses == plain and model.conv.weight.is_contiguous() and not is_compiled(model)
    assert optimizer.param_groups[0]["fused"] is None and loader.num_workers == 0
    changed = {each["id"] for each in fixes.finish() if each["changed"]}
    assert changed >= {"memory_layout", "autocast", "sdpa", "compile", "unfused_optimizer", "waiting_for_data"}
    assert not changed & {"fp32_matmul", "cudnn_benchmark", "pageable_copies", "expandable_segments"}


def test_a_compiled_model_with_dropout_draws_the_masks_of_eager_mode(apply, monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with config.patch(fallback_random=False):
        apply("compile").use_roots([nn.Linear(1, 1)])
        assert not config.fallback_random
        fixes = apply("compile")
        fixes.use_roots([nn.Sequential(nn.Dropout(0.1))])
        assert config.fallback_random
    assert not config.fallback_random


def test_every_change_has_lines_for_the_script():
    lines = {text: code_of(text, {"waiting_for_data": "8", "threads": "4"}, "cuda")[0] for text in TRIES}

    assert {text.partition("=")[0] for text in TRIES} == set(FIXES) - {"small_batch"}
    assert not [line for line in lines.values() if "{" in line]
    assert "num_workers=8" in lines["waiting_for_data"] and "set_num_threads(4)" in lines["threads"]
    assert "SDPBackend.CUDNN_ATTENTION" in lines["attention_backend=cudnn"]
