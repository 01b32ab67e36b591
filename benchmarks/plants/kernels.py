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


def chunked_loss(model: Model, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same with the logits of an eighth of the tokens at a time, made again in the backward."""

    def loss_of(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(some).float(), wanted, reduction="sum")

    pairs = zip(hidden.flatten(0, 1).chunk(8), targets.flatten().chunk(8))
    parts = [checkpoint(loss_of, some, wanted, use_reentrant=False) for some, wanted in pairs]
    return torch.stack(parts).sum() / targets.numel()


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
    steps = two(device, small, (4, 1024, 16, 131072), {}, {"loss": chunked_loss}, 1024, 16)
    return *steps, "16,384 tokens × 131,072 words of logits and their float32 copy; fixed = eight chunks, recomputed."


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
    width, num_layers, rows, num_micro_batches = (32, 3, 16, 4) if small else (4096, 12, 512, 16)

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
        "Twelve layers of 4,096 cast in each of 16 micro-batches; fixed = one autocast region.",
    )


def advanced_indexing(device: torch.device, small: bool = False) -> Plant:
    """A table of few rows looked up often: the same row again and again."""
    num_rows, width, num_indices = (8, 16, 256) if small else (256, 512, 1 << 19)

    def build(look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(num_rows, width, device=device))
        mix = nn.Linear(width, width, device=device)
        optimizer = torch.optim.AdamW([table, *mix.parameters()], fused=device.type == "cuda")
        index = torch.randint(num_rows, (num_indices,), device=device)

        def step() -> object:
            with torch.autocast(device.type, torch.bfloat16):
                value = mix(look_up(table, index)).float().square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    slow, fixed = build(lambda table, index: table[index]), build(lambda table, index: F.embedding(index, table))
    return slow, fixed, "table[index], half a million indices into 256 rows; fixed = F.embedding(index, table)."


def expert_loop(device: torch.device, small: bool = False) -> Plant:
    """Experts one after the other, each with the tokens that chose it; or one grouped product for all."""
    num_experts, width, inner, num_tokens = (8, 32, 64, 128) if small else (64, 1024, 2048, 8192)
    torch.manual_seed(0)
    counts = torch.bincount(torch.randint(num_experts, (num_tokens,)), minlength=num_experts)
    sizes, offsets = counts.tolist(), counts.cumsum(0).to(device, torch.int32)

    def build(is_grouped: bool) -> Step:
        torch.manual_seed(0)
        up = nn.Parameter(torch.randn(num_experts, width, inner, device=device, dtype=torch.bfloat16) * 0.02)
        down = nn.Parameter(torch.randn(num_experts, inner, width, device=device, dtype=torch.bfloat16) * 0.02)
        optimizer = torch.optim.AdamW([up, down], fused=device.type == "cuda")
        x = torch.randn(num_tokens, width, device=device, dtype=torch.bfloat16)

        def loop() -> torch.Tensor:
            # unbind, as the backward of up[expert] would fill a gradient of all experts for each of them.
            return torch.cat([F.gelu(part @ u) @ d for part, u, d in zip(x.split(sizes), up.unbind(), down.unbind())])

        def grouped() -> torch.Tensor:
            return torch._grouped_mm(F.gelu(torch._grouped_mm(x, up, offs=offsets)), down, offs=offsets)

        def step() -> object:
            value = (grouped() if is_grouped else loop()).float().square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return build(False), build(True), "64 experts in a Python loop, 8,192 tokens; fixed = torch._grouped_mm."


def heads_one_by_one(device: torch.device, small: bool = False) -> Plant:
    """One product a head in a list of layers; or one batched product."""
    num_heads, width, size, rows = (4, 64, 16, 32) if small else (64, 2048, 64, 512)

    def build(is_batched: bool) -> Step:
        torch.manual_seed(0)
        weights = nn.Parameter(torch.randn(num_heads, width, size, device=device, dtype=torch.bfloat16) * 0.02)
        single = nn.ParameterList(nn.Parameter(weight.detach().clone()) for weight in weights)
        parameters = [weights] if is_batched else list(single)
        optimizer = torch.optim.AdamW(parameters, fused=device.type == "cuda")
        x = torch.randn(num_heads, rows, width, device=device, dtype=torch.bfloat16)

        def step() -> object:
            made = torch.bmm(x, weights) if is_batched else torch.stack([part @ w for part, w in zip(x, single)])
            value = made.float().square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return build(False), build(True), "64 products of 512 × 2,048 × 64 in a list; fixed = one torch.bmm."


PLANTS: dict[str, Callable[..., Plant]] = {
    "attention_backend": attention_on_math,
    "attention_backend_float32": attention_in_float32,
    "handwritten_attention": handwritten_attention,
    "unfused_elementwise": gelu_written_out,
    "unfused_elementwise_norm": norm_written_out,
    "full_logits": full_logits,
    "checkpointing_with_free_memory": checkpointing,
    "autocast_cost": autocast_of_a_small_model,
    "repeated_weight_casts": casts_per_micro_batch,
    "serialised_scatter": advanced_indexing,
    "small_gemms": expert_loop,
    "small_gemms_batched": heads_one_by_one,
}
