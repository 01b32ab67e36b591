"""Whole models with one decision made wrong, each beside the same model with it made right.

    slow_step, fixed_step, sentence = PLANTS["memory_layout_resnet"](torch.device("cuda"))

Sizes are for an H200; `small=True` makes them run on a processor. Models of `transformers` take their configuration
only: nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], object]
Plant = tuple[Step, Step, str]
BF16 = torch.bfloat16


def training(
    device: torch.device,
    model: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    dtype: Any = BF16,
    **how: Any,
) -> Step:
    """A step of AdamW; `how` may have `after`, called with the model after each step."""
    model = model.to(device)
    called = torch.compile(model) if how.get("compiled") else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")
    context = torch.autocast(device.type, dtype) if dtype is not None else nullcontext()

    def step() -> None:
        with context:
            loss = loss_of(called)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if "after" in how:
            how["after"](model)

    return step


def pair_compiled(device: torch.device, model: nn.Module, loss_of: Callable, what: str, dtype: Any = BF16) -> Plant:
    other = copy.deepcopy(model)
    return (
        training(device, model, loss_of, dtype),
        training(device, other, loss_of, dtype, compiled=True),
        f"{what}, eager; without the plant torch.compile",
    )


def tokens(device: torch.device, batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length), device=device)


def bert(device: torch.device, small: bool = False) -> Plant:
    from transformers import BertConfig, BertForMaskedLM

    layers, width, batch, length = (2, 64, 2, 32) if small else (12, 768, 32, 512)
    config = BertConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 32,
                        intermediate_size=4 * width)  # fmt: skip
    ids = tokens(device, batch, length, config.vocab_size)
    return pair_compiled(device, BertForMaskedLM(config), lambda model: model(ids, labels=ids).loss, "BERT")


def llama(device: torch.device, small: bool = False) -> Plant:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, batch, length = (2, 64, 2, 32) if small else (12, 1024, 8, 1024)
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64,
                         num_key_value_heads=width // 64, intermediate_size=3 * width, vocab_size=32_000)  # fmt: skip
    ids = tokens(device, batch, length, config.vocab_size)
    return pair_compiled(device, LlamaForCausalLM(config), lambda model: model(ids, labels=ids).loss, "a Llama")


def vit(device: torch.device, small: bool = False) -> Plant:
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, batch = (2, 64, 2) if small else (12, 768, 128)
    config = ViTConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64,
                       intermediate_size=4 * width, num_labels=1000)  # fmt: skip
    images, labels = torch.randn(batch, 3, 224, 224, device=device), torch.randint(1000, (batch,), device=device)
    return pair_compiled(device, ViTForImageClassification(config), lambda model: model(images, labels=labels).loss,
                         "a vision transformer")  # fmt: skip


class Mixer(nn.Module):
    def __init__(self, width: int, length: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(width), nn.Linear(length, 2 * length), nn.Linear(2 * length, length),
                           nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)])
            for _ in range(depth)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down, norm2, wide, narrow in self.blocks:
            x = x + down(F.gelu(up(norm(x).transpose(1, 2)))).transpose(1, 2)
            x = x + narrow(F.mish(wide(norm2(x))))
        return x


def mixer(device: torch.device, small: bool = False) -> Plant:
    width, length, depth, batch = (32, 16, 2, 2) if small else (768, 196, 12, 128)
    x = torch.randn(batch, length, width, device=device)
    return pair_compiled(device, Mixer(width, length, depth), lambda model: model(x).float().square().mean(),
                         "an MLP mixer")  # fmt: skip


class Diffusion(nn.Module):
    """A small U-Net as in diffusion models: convolutions, group norms, SiLU, skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(self.block(a, b) for a, b in zip([width, *sizes], sizes))
        self.up = nn.ModuleList(self.block(2 * b, a) for a, b in zip([width, *sizes], sizes))

    def block(self, width: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, out, 3, padding=1),
            nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in reversed(self.up):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], 1))
        return self.last(x)


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, out: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True), nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        is_same = stride == 1 and width == out
        self.skip = nn.Identity() if is_same else nn.Sequential(
            nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def residual(small: bool, width: int = 64, is_depthwise: bool = False) -> nn.Module:
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                               nn.MaxPool2d(3, 2, 1)]  # fmt: skip
    given = width
    for stage, depth in enumerate((1, 1) if small else (3, 4, 6, 3)):
        inner = width << stage
        for place in range(depth):
            stride = 2 if stage and not place else 1
            blocks.append(Bottleneck(given, inner, 4 * inner, stride, inner if is_depthwise else 1))
            given = 4 * inner
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000))


def layout(device: torch.device, model: nn.Module, images: torch.Tensor, what: str, dtype: Any = BF16) -> Plant:
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    last = images.to(memory_format=torch.channels_last)
    return (
        training(device, model, lambda model: model(images).float().square().mean(), dtype),
        training(device, other, lambda model: model(last).float().square().mean(), dtype),
        f"{what} in NCHW; without the plant channels_last",
    )


def layout_of_residual(device: torch.device, small: bool = False) -> Plant:
    images = torch.randn(*((2, 3, 32, 32) if small else (128, 3, 224, 224)), device=device)
    return layout(device, residual(small, 48), images, "a residual network of width 48 under bf16 autocast")


def layout_in_float32(device: torch.device, small: bool = False) -> Plant:
    images = torch.randn(*((2, 3, 32, 32) if small else (128, 3, 224, 224)), device=device)
    return layout(device, residual(small), images, "a ResNet-50 in float32, TF32 convolutions", None)


def layout_of_depthwise(device: torch.device, small: bool = False) -> Plant:
    images = torch.randn(*((2, 3, 32, 32) if small else (128, 3, 192, 192)), device=device)
    return layout(device, residual(small, 32, is_depthwise=True), images, "a depthwise residual network")


def layout_of_diffusion(device: torch.device, small: bool = False) -> Plant:
    images = torch.randn(*((2, 3, 16, 16) if small else (32, 3, 128, 128)), device=device)
    return layout(device, Diffusion(16 if small else 128), images, "a U-Net with group norms")


def diffusion(device: torch.device, small: bool = False) -> Plant:
    images = torch.randn(*((2, 3, 16, 16) if small else (32, 3, 128, 128)), device=device)
    images = images.to(memory_format=torch.channels_last)
    model = Diffusion(16 if small else 128).to(memory_format=torch.channels_last)
    return pair_compiled(device, model, lambda model: model(images).float().square().mean(),
                         "a U-Net with group norms in channels_last")  # fmt: skip


class Typed(nn.Module):
    def __init__(self, words: int, width: int, depth: int, one_hot: bool) -> None:
        super().__init__()
        self.one_hot, self.table = one_hot, nn.Embedding(words, width)
        self.layers = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())))

    def forward(self, kinds: torch.Tensor) -> torch.Tensor:
        if self.one_hot:
            x = F.one_hot(kinds, self.table.num_embeddings).to(self.table.weight.dtype) @ self.table.weight
        else:
            x = self.table(kinds)
        return self.layers(x).float().square().mean()


def few_rows(device: torch.device, small: bool = False) -> Plant:
    words, width, num = (2, 32, 64) if small else (5, 512, 1 << 18)
    kinds = torch.randint(words, (num,), device=device)
    made = [training(device, Typed(words, width, 3, hot), lambda model: model(kinds)) for hot in (False, True)]
    return (*made, "an embedding of 5 rows for 262,144 tokens; without the plant a one-hot product")


class Stack(nn.Module):
    """A transformer's sizes without attention: many parameters."""

    def __init__(self, width: int, depth: int, words: int = 1000) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)])
            for _ in range(depth)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for norm, up, down in self.layers:
            x = x + down(F.gelu(up(norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def averaged_weights(device: torch.device, small: bool = False) -> Plant:
    width, depth, batch = (32, 2, 2) if small else (512, 48, 16)
    ids = tokens(device, batch, 128, 1000)
    made = []
    for is_loop in (True, False):
        model = Stack(width, depth).to(device)
        average = [parameter.detach().clone() for parameter in model.parameters()]

        def loop(model: nn.Module, average: list[torch.Tensor] = average) -> None:
            with torch.no_grad():
                for kept, parameter in zip(average, model.parameters()):
                    kept.mul_(0.999).add_(parameter, alpha=0.001)

        def at_once(model: nn.Module, average: list[torch.Tensor] = average) -> None:
            with torch.no_grad():
                torch._foreach_lerp_(average, list(model.parameters()), 0.001)

        made.append(training(device, model, lambda model: model(ids), after=loop if is_loop else at_once))
    return (*made, "an average of the weights by a Python loop; without the plant one foreach call")


class Cells(nn.Module):
    def __init__(self, width: int, is_loop: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTMCell(width, width) if is_loop else nn.LSTM(width, width, batch_first=True)
        self.is_loop, self.out = is_loop, nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_loop:
            state, kept = None, []
            for place in range(x.shape[1]):
                state = self.rnn(x[:, place], state)
                kept.append(state[0])
            made = torch.stack(kept, 1)
        else:
            made = self.rnn(x)[0]
        return self.out(made).float().square().mean()


def cells_in_python(device: torch.device, small: bool = False) -> Plant:
    x = torch.randn(*((2, 8, 16) if small else (64, 256, 512)), device=device)
    made = [training(device, Cells(x.shape[-1], is_loop), lambda model: model(x)) for is_loop in (True, False)]
    return (*made, "an LSTM cell stepped in Python; without the plant nn.LSTM")


def micro_batches(device: torch.device, small: bool = False) -> Plant:
    width, depth, batch = (32, 2, 4) if small else (1024, 12, 64)
    ids = tokens(device, batch, 128, 1000)
    made = []
    for number in (16 if not small else 2, 1):
        model = Stack(width, depth).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")

        def step(model: nn.Module = model, optimizer: Any = optimizer, number: int = number) -> None:
            for part in ids.chunk(number):
                with torch.autocast(device.type, BF16):
                    loss = model(part) / number
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        made.append(step)
    return (*made, "16 micro-batches of 4 × 128 tokens; without the plant one of 64 × 128")


def host_confidence(device: torch.device, small: bool = False) -> Plant:
    width, depth, batch = (32, 2, 2) if small else (1024, 16, 64)
    ids = tokens(device, batch, 128, 1000)

    class Watched(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            for norm, up, down in self.layers:
                x = x + down(F.gelu(up(norm(x))))
            logits = self.head(x)
            self.sure = logits.detach().cpu().float().softmax(-1).amax(-1).mean().item()
            return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    made = [training(device, kind(width, depth), lambda model: model(ids)) for kind in (Watched, Stack)]
    return (*made, "a confidence computed on the host from the logits; without the plant none")


def emptied(device: torch.device, small: bool = False) -> Plant:
    width, depth, batch = (32, 2, 2) if small else (1024, 24, 128)
    ids = tokens(device, batch, 128, 1000)
    empty = torch.cuda.empty_cache if device.type == "cuda" else (lambda: None)
    slow = training(device, Stack(width, depth), lambda model: model(ids), after=lambda model: empty())
    fixed = training(device, Stack(width, depth), lambda model: model(ids))
    return slow, fixed, "torch.cuda.empty_cache() after every step; without the plant none"


def deterministic(device: torch.device, small: bool = False) -> Plant:
    width, num = (32, 64) if small else (256, 1 << 19)
    source, where = torch.randn(num, width, device=device), torch.randint(1000, (num,), device=device)

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.layers(x).float()
            return torch.zeros(1000, width, device=x.device).index_add(0, where, made).square().mean()

    made = []
    for is_on in (True, False):
        train = training(device, Pool(), lambda model: model(source))

        def step(train: Step = train, is_on: bool = is_on) -> None:
            torch.use_deterministic_algorithms(is_on, warn_only=True)
            train()
            torch.use_deterministic_algorithms(False)

        made.append(step)
    return (*made, "torch.use_deterministic_algorithms(True) with index_add; without the plant off")


def eager_attention(device: torch.device, small: bool = False) -> Plant:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, batch, length = (2, 64, 2, 32) if small else (12, 1024, 8, 1024)
    made = []
    for kind in ("eager", "sdpa"):
        config = LlamaConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64,
                             num_key_value_heads=width // 64, intermediate_size=3 * width, vocab_size=8_000,
                             attn_implementation=kind)  # fmt: skip
        ids = tokens(device, batch, length, config.vocab_size)
        made.append(training(device, LlamaForCausalLM(config), lambda model, ids=ids: model(ids, labels=ids).loss))
    return (*made, "eager attention of Hugging Face; without the plant sdpa")


def checkpointed(device: torch.device, small: bool = False) -> Plant:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, batch, length = (2, 64, 2, 32) if small else (12, 1024, 8, 1024)
    made = []
    for is_on in (True, False):
        config = LlamaConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64,
                             num_key_value_heads=width // 64, intermediate_size=3 * width, vocab_size=8_000,
                             use_cache=False)  # fmt: skip
        model = LlamaForCausalLM(config).train()
        if is_on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = tokens(device, batch, length, config.vocab_size)
        made.append(training(device, model, lambda model, ids=ids: model(ids, labels=ids).loss))
    return (*made, "gradient checkpointing with free memory; without the plant none")


PLANTS: dict[str, Callable[..., Plant]] = {
    "unfused_elementwise_bert": bert,
    "unfused_elementwise_llama": llama,
    "unfused_elementwise_vit": vit,
    "unfused_elementwise_mixer": mixer,
    "unfused_elementwise_diffusion": diffusion,
    "memory_layout_residual": layout_of_residual,
    "memory_layout_float32": layout_in_float32,
    "memory_layout_depthwise": layout_of_depthwise,
    "memory_layout_diffusion": layout_of_diffusion,
    "serialized_scatter_few_rows": few_rows,
    "parameter_loop": averaged_weights,
    "recurrent_cells": cells_in_python,
    "small_micro_batches": micro_batches,
    "synchronization_host_confidence": host_confidence,
    "allocator_churn_every_step": emptied,
    "deterministic_algorithms": deterministic,
    "handwritten_attention_eager": eager_attention,
    "checkpointing_with_free_memory_llama": checkpointed,
}
