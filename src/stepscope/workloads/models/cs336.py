"""The plain transformer language model: pre-norm blocks of attention and SwiGLU, untied head, no biases."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads.models import layers
from stepscope.workloads.ops.attention import builtin_attention, causal_mask, naive_attention
from stepscope.workloads.workload import Built, Workload, knob


@dataclass(frozen=True, kw_only=True, slots=True)
class Cs336Config:
    """Embedding → layers × [x + attention(norm x); x + SwiGLU(norm x)] → norm → linear."""

    d_model: int = knob(768, "width of the residual stream")
    d_ff: int = knob(3072, "hidden width of SwiGLU")
    layers: int = knob(12, "blocks")
    heads: int = knob(12, "attention heads; d_model must be a multiple")
    vocab: int = knob(10_000, "vocabulary size; embedding and head have one row per token")
    seq_len: int = knob(128, "tokens per sequence; naive attention keeps three seq_len² tensors per head")
    batch: int = knob(4, "sequences per batch")
    attention: Literal["naive", "builtin", "sdpa"] = knob(
        "naive", "naive: einsum and a handwritten softmax; builtin: torch.softmax; sdpa: torch's fused attention"
    )
    linear: Literal["einsum", "linear"] = knob("einsum", "einsum or functional.linear for every weight matrix")
    rope: bool = knob(False, "rotary position embedding for queries and keys")
    checkpoint: int = knob(0, "recompute every k-th block in the backward pass; 0: none")


class Linear(nn.Module):
    """x Wᵀ for W [outputs, inputs], by einsum or by functional.linear."""

    def __init__(self, inputs: int, outputs: int, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.normal_(self.weight, std=(2 / (inputs + outputs)) ** 0.5)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "einsum":
            return torch.einsum("...i,oi->...o", x, self.weight)
        return functional.linear(x, self.weight)


class SelfAttention(nn.Module):
    def __init__(self, config: Cs336Config) -> None:
        super().__init__()
        self.heads, self.attention = config.heads, config.attention
        d_model = config.d_model
        self.query, self.key, self.value, self.output = (Linear(d_model, d_model, config.linear) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if turn is not None:
            query, key = layers.rope(query, *turn), layers.rope(key, *turn)
        if self.attention == "sdpa":
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            written_out = naive_attention if self.attention == "naive" else builtin_attention
            seen = written_out(query, key, value, mask)
        return self.output(seen.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate x) · up x)."""

    def __init__(self, config: Cs336Config) -> None:
        super().__init__()
        self.gate = Linear(config.d_model, config.d_ff, config.linear)
        self.up = Linear(config.d_model, config.d_ff, config.linear)
        self.down = Linear(config.d_ff, config.d_model, config.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm x), then x + SwiGLU(norm x)."""

    def __init__(self, config: Cs336Config) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = layers.RMSNorm(config.d_model), layers.RMSNorm(config.d_model)
        self.attention, self.mlp = SelfAttention(config), SwiGLU(config)

    def forward(self, x: Tensor, mask: Tensor | None, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, turn)
        return x + self.mlp(self.mlp_norm(x))


class TransformerLM(nn.Module):
    """Tokens [batch, seq_len] → logits [batch, seq_len, vocab], or with targets the mean cross entropy."""

    def __init__(self, config: Cs336Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = layers.RMSNorm(config.d_model)
        self.head = Linear(config.d_model, config.vocab, config.linear)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        config, length = self.config, tokens.shape[1]
        x = self.embedding(tokens)
        mask = None if config.attention == "sdpa" else causal_mask(length, tokens.device)
        turn = layers.rope_tables(length, config.d_model // config.heads, x) if config.rope else None
        x = layers.run_blocks(self.blocks, x, mask, turn, checkpoint_every=config.checkpoint)
        logits = self.head(self.norm(x))
        return layers.logits_or_loss(logits, targets)


def forward_flops(config: Cs336Config) -> int:
    """Return the FLOPs: 2 per token and matmul weight, and 2·seq_len²·d per layer for causal attention."""
    d_model = config.d_model
    weights = config.layers * (4 * d_model**2 + 3 * d_model * config.d_ff) + config.vocab * d_model
    attention = config.layers * config.batch * 2 * config.seq_len**2 * d_model
    return 2 * config.batch * config.seq_len * weights + attention


def build(config: Cs336Config) -> Built:
    if config.d_model % config.heads:
        raise UsageError(f"cs336: d_model={config.d_model} must be a multiple of heads={config.heads}")
    proof = layers.attention_proof(config.attention, config.layers)
    flops = forward_flops(config)
    return layers.language_model(TransformerLM(config), config, proof, forward_flops=flops, phases_apart=True)


_sizes = partial(layers.sizes, "d_model d_ff layers heads")
TINY = {**_sizes(64, 128, 2, 4), "vocab": 256}

WORKLOAD = Workload(
    name="cs336",
    about="a plain transformer language model in six sizes, with handwritten or fused attention",
    config=Cs336Config,
    presets={
        "small": _sizes(768, 3072, 12, 12),
        "medium": _sizes(1024, 4096, 24, 16),
        "large": _sizes(1280, 5120, 36, 20),
        "xl": _sizes(1600, 6400, 48, 25),
        "2.7B": _sizes(2560, 10240, 32, 32),
        "10B": _sizes(4608, 12288, 50, 36),
        "tiny": TINY,
    },
    build=build,
    reference={"attention": "naive", "linear": "einsum"},
    gate={**TINY, "batch": 2, "seq_len": 48},
)
