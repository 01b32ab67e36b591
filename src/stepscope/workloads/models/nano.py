"""A GPT with dense attention, or sparse attention by an SDPA mask or by FlexAttention blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads import sparse_patterns as patterns
from stepscope.workloads.models import layers
from stepscope.workloads.ops.attention import causal_mask, naive_attention
from stepscope.workloads.ops.random_inputs import built_over
from stepscope.workloads.workload import Built, Evidence, Proof, Value, Workload, knob


@dataclass(frozen=True, kw_only=True, slots=True)
class NanoConfig:
    """Embedding → layers × [x + attention(norm x); x + SwiGLU(norm x)] → norm → tied head."""

    layers: int = knob(6, "blocks")
    heads: int = knob(8, "attention heads; the model's width is heads × head_width")
    head_width: int = knob(64, "width of a head; FlexAttention on a GPU needs 16 or more")
    kv_heads: int = knob(0, "key and value heads, a divisor of heads (grouped-query attention); 0: same as heads")
    vocab: int = knob(50257, "vocabulary size; embedding and head share weights")
    seq_len: int = knob(1024, "tokens per sequence")
    batch: int = knob(1, "sequences per batch")
    attention: Literal["dense", "sparse_mask", "sparse_flex"] = knob(
        "dense",
        "dense: causal SDPA; sparse_mask: SDPA with a bool mask, all pairs computed; sparse_flex: blocks skipped",
    )
    pattern: Literal["fixed", "dynamic"] = knob(
        "fixed", "fixed: the first tokens are global; dynamic: a learned score chooses up to 64, at most seq_len ÷ 5"
    )
    window: int = knob(256, "a query sees keys up to window ÷ 2 before it")
    global_tokens: int = knob(32, "tokens that every later query sees")
    random_keys: int = knob(16, "additional random keys per query, rounded up to whole blocks of 64")
    random: Literal["blocks", "scattered"] = knob(
        "blocks", "blocks: shared by 128 queries, so blocks are skipped; scattered: drawn per query, none skipped"
    )
    part: Literal["model", "attention"] = knob(
        "model", "the whole model, or only one layer's attention over given queries, keys and values"
    )
    written_out: bool = knob(False, "attention by formula with the same mask, the reference for the variants")
    checkpoint: int = knob(0, "recompute every k-th block in the backward pass; 0: none")

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    @property
    def sparse(self) -> bool:
        return self.attention != "dense"

    @property
    def dynamic(self) -> bool:
        return self.pattern == "dynamic"

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def num_chosen(self) -> int:
        """Return the global tokens per sequence that the dynamic pattern chooses."""
        return patterns.chosen_budget(self.seq_len, self.global_tokens)

    def sparse_pattern(self) -> patterns.SparsePattern:
        """Return the part of the pattern that does not depend on the input."""
        return patterns.SparsePattern(
            seq_len=self.seq_len,
            window=self.window,
            global_tokens=0 if self.dynamic else self.global_tokens,
            random_keys=self.random_keys,
            random=self.random,
        )


def pattern_rule(config: NanoConfig) -> patterns.Rule:
    """Return the fixed part of the pattern as a function of positions; every causal pair if dense."""
    if not config.sparse:
        return torch.ge  # type: ignore[no-any-return]  # torch is not type checked here
    pattern = config.sparse_pattern()
    return patterns.fixed_rule(pattern, patterns.random_table(pattern))


class PatternAttention(nn.Module):
    """Attention over queries [batch, heads, seq_len, head_width], keys and values, without parameters.

    The pattern is made once, on the default device; a forward pass only reads it. With the dynamic pattern,
    importance [batch, seq_len] selects the global tokens of the whole sequence. The selection has no gradient;
    importance learns because it also scales their values (by 2·sigmoid, initially 1).
    """

    def __init__(self, config: NanoConfig, rule: patterns.Rule) -> None:
        super().__init__()
        self.config, self.rule = config, rule
        self.fused = config.attention == "sparse_flex" and not config.written_out
        self.device = torch.empty(0).device
        self.grouped = config.num_kv_heads != config.heads
        if config.sparse and config.dynamic:
            first = torch.arange(config.num_chosen).repeat(config.batch, 1)
            self.register_buffer("chosen", first, persistent=False)
        if self.fused:
            from torch.nn.attention.flex_attention import flex_attention

            self.block_mask = (
                patterns.gathered_block_mask(rule, self.chosen, config.seq_len)
                if config.dynamic
                else patterns.flex_block_mask(rule, config.seq_len, self.device)
            )
            # Uncompiled, FlexAttention computes every score, which is good enough on a CPU.
            backend = "eager" if self.device.type == "cpu" else "inductor"
            self.flex_attention = torch.compile(flex_attention, backend=backend, dynamic=False)
        elif config.sparse:
            self.register_buffer("mask", patterns.dense_mask(rule, config.seq_len, self.device), persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, importance: Tensor | None = None) -> Tensor:
        config = self.config
        if importance is not None:
            value = self.choose(importance, value)
        if self.fused:
            return self.flex(query, key, value)
        mask = self.mask if config.sparse else None
        if mask is not None and config.dynamic:
            mask = patterns.with_chosen(mask, self.chosen)
        if config.written_out:
            mask = causal_mask(query.shape[2], query.device) if mask is None else mask
            return naive_attention(query, self.repeat(key), self.repeat(value), mask)
        if mask is None:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return self.masked(query, key, value, mask)

    def choose(self, importance: Tensor, value: Tensor) -> Tensor:
        """Return the values, scaled for the most important tokens, and store their positions in `chosen`."""
        top = importance.topk(self.config.num_chosen, dim=-1)
        self.chosen.copy_(top.indices)
        scale = torch.ones_like(importance).scatter(1, top.indices, 2 * torch.sigmoid(top.values))
        return value * scale[:, None, :, None].to(value.dtype)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.config.heads // self.config.num_kv_heads, dim=1) if self.grouped else x

    def masked(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        # Backends with a mask do not support groups. Heads are repeated, else SDPA falls back to the math backend.
        return functional.scaled_dot_product_attention(query, self.repeat(key), self.repeat(value), attn_mask=mask)

    def flex(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.config.dynamic:
            key, value = patterns.gather_chosen(key, self.chosen), patterns.gather_chosen(value, self.chosen)
        if query.device.type == "cpu":
            # FlexAttention has no backward on a CPU and rejects tensors that require gradients.
            if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
                # The same mask, every score computed.
                return self.masked(query, key, value, patterns.unfused_mask(self.block_mask, query.shape[0]))
            query, key, value = query.detach(), key.detach(), value.detach()
        if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
            # Autocast covers SDPA but not FlexAttention.
            narrow = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
        return self.flex_attention(query, key, value, block_mask=self.block_mask, enable_gqa=self.grouped)

    def num_pairs(self) -> float:
        """Return the pairs per sequence that the last pass needed, averaged over the batch."""
        config = self.config
        if not config.sparse:
            return patterns.causal_pairs(config.seq_len)
        pairs = config.sparse_pattern().num_pairs()
        added = patterns.num_chosen_pairs(self.rule, self.chosen, config.seq_len) if config.dynamic else 0
        return pairs + added / config.batch

    def num_executed_pairs(self) -> int:
        """Return the pairs per sequence that were computed: whole tiles of 128 × 128, or all."""
        if self.fused and self.device.type != "cpu":
            return patterns.num_touched_pairs(self.block_mask)
        if self.config.sparse or self.config.written_out:
            return self.config.seq_len**2
        tiles = -(-self.config.seq_len // patterns.FLEX_BLOCK)
        return tiles * (tiles + 1) // 2 * patterns.FLEX_BLOCK**2


class SelfAttention(nn.Module):
    """Multi-head self-attention with RoPE; keys and values may have fewer heads."""

    def __init__(self, config: NanoConfig, core: PatternAttention) -> None:
        super().__init__()
        self.head_counts = (config.heads, config.num_kv_heads, config.num_kv_heads)
        self.qkv = nn.Linear(config.width, sum(self.head_counts) * config.head_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        if config.dynamic:
            self.importance = nn.Linear(config.width, 1, bias=False)
        self.chooses = config.dynamic and config.sparse
        self.core = core

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (sum(self.head_counts), -1)).transpose(1, 2)
        query, key, value = heads.split(self.head_counts, dim=1)
        importance = self.importance(x).squeeze(-1) if self.chooses else None
        seen = self.core(layers.rope(query, cos, sin), layers.rope(key, cos, sin), value, importance)
        return self.output(seen.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """x + attention(norm x), then x + SwiGLU(norm x) of four times the width."""

    def __init__(self, config: NanoConfig, core: PatternAttention) -> None:
        super().__init__()
        width = config.width
        self.attention_norm, self.mlp_norm = layers.RMSNorm(width), layers.RMSNorm(width)
        self.attention = SelfAttention(config, core)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        hidden = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Nano(nn.Module):
    """Tokens [batch, seq_len] → logits [batch, seq_len, vocab], or with targets the mean cross entropy."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        rule = pattern_rule(config)
        shared = None if config.dynamic else PatternAttention(config, rule)
        # Each layer keeps its own choice until the backward pass; a fixed pattern is shared by all layers.
        cores = [shared or PatternAttention(config, rule) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(Block(config, core) for core in cores)
        self.norm = layers.RMSNorm(config.width)

    def cores(self) -> list[PatternAttention]:
        return [block.attention.core for block in self.blocks]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = layers.rope_tables(tokens.shape[1], self.config.head_width, x)
        x = layers.run_blocks(self.blocks, x, cos, sin, checkpoint_every=self.config.checkpoint)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return layers.logits_or_loss(logits, targets)


def attention_flops(config: NanoConfig) -> int:
    """Return 4·head_width FLOPs per pair and head: half of seq_len² pairs if dense, else the pattern's.

    A chosen token counts as seen by half of the queries; `facts` gives the actual number.
    """
    pairs = config.seq_len**2 // 2
    if config.sparse:
        pairs = config.sparse_pattern().num_pairs()
        pairs += config.num_chosen * config.seq_len // 2 if config.dynamic else 0
    return 4 * config.batch * pairs * config.width


def forward_flops(config: NanoConfig) -> int:
    """Return the FLOPs: 2 per token and matmul weight, head included, and the attention of every layer."""
    if config.part == "attention":
        return attention_flops(config)
    width, kv_width = config.width, config.num_kv_heads * config.head_width
    layer = 2 * width**2 + 2 * width * kv_width + 12 * width**2 + (width if config.dynamic else 0)
    weights = config.layers * layer + config.vocab * width
    return 2 * config.batch * config.seq_len * weights + config.layers * attention_flops(config)


def _proof(config: NanoConfig) -> Proof:
    def shows(evidence: Evidence) -> str | None:
        fused = evidence.written("scaled_dot_product_attention")
        masks = layers.num_masks(evidence)
        if config.attention != "sparse_flex":
            if fused < (1 if config.part == "attention" else max(1, config.layers)):
                return None
            if config.attention == "dense":
                return None if masks else f"scaled_dot_product_attention ×{fused}, no mask"
            return f"scaled_dot_product_attention ×{fused}, with masks ×{masks}" if masks else None
        # Only a GPU kernel skips blocks; on a CPU the claim stays unproven.
        launches = evidence.launches("flex_attention")
        return f"flex_attention kernels ×{launches}" if launches else None

    return Proof(claim=f"attention={config.attention}", shows=shows)


def build(config: NanoConfig) -> Built:
    """Return the model with random tokens, or its attention with random queries, keys and values."""
    if config.heads % config.num_kv_heads:
        raise UsageError(f"nano: heads={config.heads} must be a multiple of kv_heads={config.kv_heads}")
    if config.dynamic and not config.num_chosen:
        raise UsageError("nano: pattern=dynamic needs global_tokens ≥ 1 and seq_len ≥ 5")
    alone = config.part == "attention"
    module = PatternAttention(config, pattern_rule(config)) if alone else Nano(config)
    cores = [module] if alone else module.cores()

    def facts() -> Mapping[str, float]:
        pairs = sum(core.num_pairs() for core in cores) / len(cores)
        executed = sum(core.num_executed_pairs() for core in cores) / len(cores)
        flops_per_pair = 4 * config.width * config.batch * len(cores)
        density = pairs / config.seq_len**2
        return {
            "density": density,
            "causal_density": pairs / patterns.causal_pairs(config.seq_len),
            "sparsity": 1 - density,
            "attention_formula_flops": pairs * flops_per_pair,
            "attention_executed_flops": executed * flops_per_pair,
        }

    proofs = () if config.written_out else (_proof(config),)
    if not alone:
        return layers.language_model(module, config, *proofs, forward_flops=forward_flops(config), facts=facts)
    num_heads = {"query": config.heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    shapes: dict[str, tuple[int, ...]] = {
        name: (config.batch, num, config.seq_len, config.head_width) for name, num in num_heads.items()
    }
    if config.sparse and config.dynamic:
        shapes["importance"] = (config.batch, config.seq_len)
    return built_over(module, config, shapes, *proofs, forward_flops=forward_flops(config), facts=facts)


_sizes = partial(layers.sizes, "layers heads seq_len window global_tokens random_keys")
TINY: dict[str, Value] = {**_sizes(2, 4, 512, 128, 16, 16), "head_width": 16, "vocab": 256, "batch": 2}

WORKLOAD = Workload(
    name="nano",
    about="a GPT with dense attention, or sparse attention by a mask or by skipped blocks",
    config=NanoConfig,
    presets={
        "decoder_tiny": _sizes(6, 8, 1024, 256, 32, 16),
        "decoder_small": _sizes(12, 12, 2048, 512, 64, 32),
        "decoder_medium": _sizes(24, 16, 4096, 1024, 128, 64),
        "tiny": TINY,
    },
    build=build,
    reference={"written_out": True},
    alternatives={"attention": (("dense",), ("sparse_mask", "sparse_flex"))},
    # Heads are not changed, so that grouped-query attention is checked with its own grouping.
    gate={name: value for name, value in TINY.items() if name != "heads"},
)
