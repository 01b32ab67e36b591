"""Training steps with a cause planted in what the GPU computes, each beside the same step without it.

    slow_step, fixed_step, sentence = PLANTS["handwritten_attention"](torch.device("cuda"))

Both are functions without arguments that train one step; sizes are for an H200, and `small=True` makes them run on a
processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]
Plant = tuple[Step, Step, str]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Activation = Callable[[torch.Tensor], torch.Tensor]


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def on_math(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def in_float32(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with torch.autocast(query.device.type, enabled=False):
        return flash(query.float(), key.float(), value.float()).to(query.dtype)


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The formula as papers write it."""
    length = query.shape[-2]
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~causal, float("-inf"))
    return torch.softmax(scores, -1) @ value


def gelu_by_hand(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class RmsNormByHand(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, attend: Attend, activation: Activation, norm: type[nn.Module]):
        super().__init__()
        self.num_heads, self.attend, self.activation = num_heads, attend, activation
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = self.attend(parts[0], parts[1], parts[2]).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(attended)
        return x + self.down(self.activation(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A decoder of plain blocks that gives what comes before the last layer."""

    def __init__(
        self,
        num_layers: int,
        width: int,
        num_heads: int,
        vocabulary: int,
        attend: Attend = flash,
        activation: Activation = F.gelu,
        norm: type[nn.Module] = nn.LayerNorm,
        is_checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width, num_heads, attend, activation, norm) for _ in range(num_layers))
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def whole_loss(model: Model, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(hidden).flatten(0, 1).float(), targets.flatten())


def compiled_loss() -> Callable[[Model, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The same in one pass each way over the logits, and with no copy of them."""
    return torch.compile(whole_loss)


def training(
    model: Model,
    device: torch.device,
    batch: int,
    length: int,
    *,
    is_autocast: bool = True,
    is_compiled: bool = False,
    loss: Callable[[Model, torch.Tensor, torch.Tensor], torch.Tensor] = whole_loss,
) -> Step:
    """A step of AdamW on one batch of random tokens."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(model.head.out_features, (batch, length), device=device)
    forward = torch.compile(model) if is_compiled else model

    def step() -> object:
        with torch.autocast(device.type, torch.bfloat16) if is_autocast else nullcontext():
            value = loss(model, forward(tokens), tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


def two(
    device: torch.device,
    small: bool,
    sizes: tuple[int, int, int, int],
    slow: dict,
    fixed: dict,
    length: int,
    batch: int,
) -> tuple[Step, Step]:
    """Two models that differ in `slow` and `fixed`; `sizes` are layers, width, heads and vocabulary."""
    if small:
        sizes, length, batch = (2, 64, 2, 4096), 96, 2
    steps = []
    for options in (slow, fixed):
        torch.manual_seed(0)
        how = {name: options.pop(name) for name in ("is_autocast", "is_compiled", "loss") if name in options}
        steps.append(training(Model(*sizes, **options), device, batch, length, **how))
    return steps[0], steps[1]


def attention_on_math(device: torch.device, small: bool = False) -> Plant:
    steps = two(device, small, (8, 1024, 16, 16384), {"attend": on_math}, {}, 2048, 8)
    return *steps, "Eight layers at 8 × 2,048 with SDPA held on its math back end; fixed = flash may be chosen."


def attention_in_float32(device: torch.device, small: bool = False) -> Plant:
    steps = two(device, small, (8, 1024, 16, 16384), {"attend": in_float32}, {}, 2048, 8)
    return *steps, "Query, key and value cast to float32 before SDPA; fixed = left in bfloat16."


def handwritten_attention(device: torch.device, small: bool = False) -> Plant:
    steps = two(device, small, (8, 1024, 16, 16384), {"attend": by_hand}, {}, 2048, 8)
    return *steps, "Eight layers at 8 × 2,048 with attention written out; fixed = SDPA with is_causal=True."


def gelu_written_out(device: torch.device, small: bool = False) -> Plant:
    fused = {"activation": lambda x: F.gelu(x, approximate="tanh")}
    steps = two(device, small, (12, 1024, 16, 16384), {"activation": gelu_by_hand}, fused, 1024, 16)
    return *steps, "GELU written out in eight ops; fixed = F.gelu(approximate='tanh')."


def norm_written_out(device: torch.device, small: bool = False) -> Plant:
    steps = two(device, small, (12, 1024, 16, 16384), {"norm": RmsNormByHand}, {"norm": nn.RMSNorm}, 1024, 16)
    return *steps, "RMSNorm written out in float32; fixed = nn.RMSNorm."


def full_logits(device: torch.device, small: bool = False) -> Plant:
    steps = two(device, small, (4, 1024, 16, 131072), {}, {"loss": compiled_loss()}, 1024, 16)
    return *steps, "16,384 tokens × 131,072 words of logits and their float32 copy; fixed = head and loss compiled."


def full_logits_of_a_small_head(device: torch.device, small: bool = False) -> Plant:
    steps = two(device, small, (8, 1024, 16, 16384), {}, {"loss": compiled_loss()}, 2048, 8)
    return *steps, "16,384 tokens × 16,384 words behind eight layers; fixed = head and loss compiled."


def checkpointing(device: torch.device, small: bool = False) -> Plant:
    steps = two(device, small, (12, 1024, 16, 16384), {"is_checkpointed": True}, {}, 1024, 16)
    return *steps, "Every block checkpointed on a device that is mostly free; fixed = no checkpoint."


def autocast_of_a_small_model(device: torch.device, small: bool = False) -> Plant:
    """Many narrow layers on many rows: casts move as much as the products do."""
    width, num_layers, rows = (32, 4, 64) if small else (64, 24, 1 << 20)

    def build(is_autocast: bool) -> Step:
        torch.manual_seed(0)
        layers = [part for _ in range(num_layers) for part in (nn.LayerNorm(width), nn.Linear(width, width))]
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
        x = torch.randn(rows, width, device=device)
        torch.set_float32_matmul_precision("high")

        def step() -> object:
            with torch.autocast(device.type, torch.bfloat16) if is_autocast else nullcontext():
                value = model(x).float().square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return (
        build(True),
        build(False),
        "24 norms and layers of 64 under autocast, a million rows; fixed = TF32, no autocast.",
    )


def casts_per_micro_batch(device: torch.device, small: bool = False) -> Plant:
    width, num_layers, rows, num_micro_batches = (32, 3, 16, 4) if small else (8192, 8, 512, 8)

    def build(is_one_region: bool) -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers))).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
        batches = torch.randn(num_micro_batches, rows, width, device=device)

        def region() -> torch.autocast:
            return torch.autocast(device.type, torch.bfloat16)

        def step() -> object:
            value = None
            with region() if is_one_region else nullcontext():
                for x in batches:
                    with region():
                        value = model(x).float().square().mean()
                    value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return (
        build(False),
        build(True),
        "Eight layers of 8,192 cast in each of 8 micro-batches; fixed = one autocast region.",
    )


PLANTS: dict[str, Callable[..., Plant]] = {
    "attention_backend": attention_on_math,
    "attention_backend_float32": attention_in_float32,
    "handwritten_attention": handwritten_attention,
    "unfused_elementwise": gelu_written_out,
    "unfused_elementwise_norm": norm_written_out,
    "full_logits": full_logits,
    "full_logits_small_head": full_logits_of_a_small_head,
    "checkpointing_with_free_memory": checkpointing,
    "autocast_cost": autocast_of_a_small_model,
    "repeated_weight_casts": casts_per_micro_batch,
}
