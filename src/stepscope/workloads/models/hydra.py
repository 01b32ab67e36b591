"""hydra: blocks that run one shared MLP several times and let tokens skip some of the runs.

A block is h = x + ½·CCGQA(norm(x)), then R recursions of one MLP, then a norm:

    h ← h + w_r · MLP(norm(h + bias_r + embed_r))    r = 0 … R − 1
    δ = (R − 1)·sigmoid(router(h)),  w_r = exp(−(r − δ)² ÷ 2σ²),  σ = R ÷ 2

δ is the depth that a linear router assigns to a token after attention; w_r is a Gaussian weight of recursion r.

CCGQA is compressed convolutional grouped-query attention, at a quarter of the model's width.

Two knobs select which token runs which recursion, and thus change the result:
- `routing=static`: every token runs every recursion.
- `routing=dynamic`: a token runs the recursions r ≤ δ + ½ with the same weights. If all tokens run all of them,
  static and dynamic are the same function.
- `capacity` c < 1: in blocks 1 … N − 2, only the round(c·S) tokens of each sequence that a second router scores
  highest run the MLP. The score does not scale the update; the router learns from a straight-through gradient of
  sigmoid(score). At 1.0 nothing is chosen, and that router has no gradient.

`dispatch` selects how it is executed, with equal outputs and gradients. `gather` sorts tokens by their number of runs
and runs each recursion on a shrinking prefix. `mask` runs everything and multiplies the rest by 0. With `dynamic`,
`gather` synchronizes once per block to learn the counts; compiled, it has a graph break there and dynamic shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads.custom_op import GatherRows
from stepscope.workloads.models.layers import RMSNorm, rope, rope_tables, run_blocks
from stepscope.workloads.ops.cross_entropy import CHUNK_ROWS, loss_proof, next_token_loss
from stepscope.workloads.ops.value_shift import pad as value_shift
from stepscope.workloads.workload import Batch, Built, Evidence, Proof, Workload, knob, numbers, ran


class CausalConvs(nn.Module):
    """Two causal convolutions over time with three taps: one within each head, one across channels. No bias."""

    TAPS = 3

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.within_heads = nn.Conv1d(channels, channels, self.TAPS, groups=heads, bias=False)
        self.across_heads = nn.Conv1d(channels, channels, self.TAPS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x [batch, channels, length]."""
        # One padding serves both: without biases, zeros stay zeros in the first convolution. It also replaces the
        # copy that a convolution makes of a transposed slice.
        padded = functional.pad(x, (2 * (self.TAPS - 1), 0))
        return self.across_heads(self.within_heads(padded))


class CCGQA(nn.Module):
    """Attention in a latent of width dim ÷ 4, with causal convolutions on q and k and a shifted value."""

    def __init__(self, dim: int, heads: int, kv_heads: int, gqa: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.gqa = heads, kv_heads, gqa
        self.latent = dim // 4
        self.head_width = self.latent // heads
        self.kv_width = kv_heads * self.head_width
        self.qkv = nn.Linear(dim, self.latent + 2 * self.kv_width, bias=False)
        self.q_convs = CausalConvs(self.latent, heads)
        self.k_convs = CausalConvs(self.kv_width, kv_heads)
        # q·k of two independent unit vectors has standard deviation 1 ÷ √head_width.
        self.temperature = nn.Parameter(torch.full((1,), self.head_width**0.5))
        self.out = nn.Linear(self.latent, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over x [batch, length, dim]; cos and sin [length, head_width ÷ 2] are the RoPE tables."""
        q_before, k_before, v = self.qkv(x).split((self.latent, self.kv_width, self.kv_width), dim=-1)
        q = self._convolved(self.q_convs, q_before, self.heads)
        k = self._convolved(self.k_convs, k_before, self.kv_heads)
        q = q + 0.5 * self._mean_of_heads(k_before, self.kv_heads)
        k = k + 0.5 * self._mean_of_heads(q_before, self.heads)
        # Norm, temperature and rotation in float32 or wider; rounded once, before attention.
        q_wide = functional.normalize(q.to(cos.dtype), dim=-1)
        k_wide = functional.normalize(k.to(cos.dtype), dim=-1) * self.temperature.to(cos.dtype)
        q, k = rope(q_wide, cos, sin).to(v.dtype), rope(k_wide, cos, sin).to(v.dtype)
        v = value_shift(v).unflatten(-1, (self.kv_heads, self.head_width)).transpose(1, 2)
        if self.gqa == "repeated":
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=1.0, enable_gqa=self.gqa == "native"
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _convolved(self, convs: CausalConvs, x: Tensor, heads: int) -> Tensor:
        """Convolve x [batch, length, channels] over time and return [batch, heads, length, head_width]."""
        return convs(x.transpose(1, 2)).unflatten(1, (heads, self.head_width)).transpose(2, 3)

    def _mean_of_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return the mean over heads of x [batch, length, channels], as [batch, 1, length, head_width]."""
        return x.unflatten(-1, (heads, self.head_width)).mean(dim=2).unsqueeze(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraConfig:
    dim: int = knob(768, "width of the residual stream; attention uses a quarter of it")
    blocks: int = knob(8, "blocks")
    recursions: int = knob(4, "runs of each block's MLP")
    heads: int = knob(12, "query heads, each dim ÷ 4 ÷ heads wide")
    kv_heads: int = knob(3, "key and value heads, shared by groups of query heads")
    vocab: int = knob(50257, "vocabulary size; the head is tied to the embedding")
    batch: int = knob(4, "sequences per batch")
    seq_len: int = knob(4096, "tokens per sequence")
    routing: Literal["static", "dynamic"] = knob(
        "static", "every token runs every recursion, or each up to its depth"
    )
    capacity: float = knob(1.0, "share of tokens that run the MLP in blocks 1 … N − 2; 1.0: all")
    dispatch: Literal["gather", "mask"] = knob("gather", "compute only the tokens that continue, or all with a mask")
    loss: Literal["full", "chunked", "fused"] = knob(
        "full", "all logits; chunks, recomputed; chunks with fused gradients"
    )
    chunk_rows: int = knob(CHUNK_ROWS, "rows of logits in memory at once in a chunked or fused loss")
    gqa: Literal["native", "repeated"] = knob("native", "grouped by SDPA (not memory-efficient), or k and v repeated")
    checkpoint: int = knob(0, "recompute every k-th block in the backward pass; 0: none")


def mlp_width(dim: int) -> int:
    """Return the hidden width of the MLP: 2.67·dim, rounded up to a multiple of 256.

    >>> mlp_width(768)
    2304
    """
    return -(-int(2.67 * dim) // 256) * 256


class SwiGLU(nn.Module):
    """silu(gate) · up → down, with gate and up in one matmul. No bias."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """Attention, then one MLP run up to `recursions` times per token."""

    def __init__(self, config: HydraConfig, routed: bool) -> None:
        super().__init__()
        dim, self.recursions = config.dim, config.recursions
        self.routing, self.dispatch, self.capacity = config.routing, config.dispatch, config.capacity
        self.attention_norm = RMSNorm(dim)
        self.attention = CCGQA(dim, config.heads, config.kv_heads, config.gqa)
        self.recursion_bias = nn.Parameter(torch.zeros(config.recursions, dim))
        self.recursion_embedding = nn.Parameter(torch.randn(config.recursions, dim) * 0.02)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = SwiGLU(dim, mlp_width(dim))
        self.depth_router = _router(dim, bias=True)
        self.capacity_router = _router(dim, bias=False) if routed else None
        self.final_norm = RMSNorm(dim)
        self.executed_rows = 0  # rows that the MLP processed in the last pass, over all recursions

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + 0.5 * self.attention(self.attention_norm(x), cos, sin)
        weight, num_runs, num_kept = self.route(h)
        rows, weight, num_runs = h.flatten(0, 1), weight.flatten(0, 1).to(h.dtype), num_runs.flatten()
        run = self._gathered if self.dispatch == "gather" else self._masked
        return self.final_norm(run(rows, weight, num_runs, num_kept).view_as(h))

    def route(self, h: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return weights [batch, length, recursions], runs per token [batch, length], and how many tokens run."""
        batch, length, _ = h.shape
        logit = self.depth_router(h)
        wide = torch.promote_types(logit.dtype, torch.float32)
        depth = (self.recursions - 1) * torch.sigmoid(logit.to(wide))
        distance = torch.arange(self.recursions, device=h.device, dtype=wide) - depth
        weight = torch.exp(-0.5 * (distance / (self.recursions / 2)) ** 2)
        num_runs = torch.full((batch, length), self.recursions, device=h.device)
        if self.routing == "dynamic":
            num_runs = (depth.detach().squeeze(-1) + 0.5).floor().long() + 1
        num_kept = max(1, round(self.capacity * length))
        if self.capacity_router is None or num_kept == length:
            return weight, num_runs, batch * length
        score = self.capacity_router(h).squeeze(-1)
        best = score.detach().topk(num_kept, dim=1, sorted=False).indices
        num_runs = num_runs * torch.zeros_like(num_runs).scatter(1, best, 1)
        gate = torch.sigmoid(score.to(wide))
        return weight * (1 + (gate - gate.detach())).unsqueeze(-1), num_runs, batch * num_kept

    def _update(self, rows: Tensor, weight: Tensor, recursion: int) -> Tensor:
        where = self.recursion_bias[recursion] + self.recursion_embedding[recursion]
        return rows + weight[:, recursion, None] * self.mlp(self.mlp_norm(rows + where))

    def _masked(self, rows: Tensor, weight: Tensor, num_runs: Tensor, num_kept: int) -> Tensor:
        self.executed_rows = self.recursions * len(rows)
        for recursion in range(self.recursions):
            rows = self._update(rows, weight * (num_runs > recursion)[:, None], recursion)
        return rows

    def _gathered(self, rows: Tensor, weight: Tensor, num_runs: Tensor, num_kept: int) -> Tensor:
        dynamic = self.routing == "dynamic"
        counts = _counts(num_runs, self.recursions) if dynamic else [num_kept] * self.recursions
        self.executed_rows = sum(counts)
        if counts[-1] == len(rows):
            for recursion in range(self.recursions):
                rows = self._update(rows, weight, recursion)
            return rows
        order = num_runs.argsort(descending=True, stable=True)
        inverse = order.argsort()
        going = GatherRows.apply(rows, order, inverse, None, 1)
        weight = GatherRows.apply(weight, order, inverse, None, 1)
        stopped: list[Tensor] = []
        for recursion, count in enumerate(counts):
            stopped.append(going[count:])
            going = self._update(going[:count], weight[:count], recursion)
        return GatherRows.apply(torch.cat((going, *reversed(stopped))), inverse, order, None, 1)


def _router(dim: int, bias: bool) -> nn.Linear:
    """Return a linear map dim → 1 whose scores have standard deviation 1, so that tokens differ from the start."""
    router = nn.Linear(dim, 1, bias=bias)
    nn.init.normal_(router.weight, std=dim**-0.5)
    if bias:
        nn.init.zeros_(router.bias)
    return router


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the only synchronization
def _counts(num_runs: Tensor, depth: int) -> list[int]:
    even = [num_runs.shape[0] * (depth - recursion) // depth for recursion in range(depth)]
    going = (num_runs[:, None] > torch.arange(depth, device=num_runs.device)).sum(dim=0)
    return numbers(going, even, "tokens stop evenly over the recursions")


class Hydra(nn.Module):
    """Token embedding · √dim → blocks → RMSNorm → tied head."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        last = config.blocks - 1
        self.blocks = nn.ModuleList(Block(config, routed=0 < index < last) for index in range(config.blocks))
        self.norm = RMSNorm(config.dim)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states [batch, length, dim]."""
        x = self.embedding(tokens) * self.config.dim**0.5
        tables = rope_tables(tokens.shape[1], self.config.dim // 4 // self.config.heads, x)
        return self.norm(run_blocks(self.blocks, x, *tables, checkpoint_every=self.config.checkpoint))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits [batch, length, vocab], or with targets [batch, length] the loss."""
        hidden, weight = self.hidden(tokens), self.embedding.weight
        if targets is None:
            return functional.linear(hidden, weight)
        return next_token_loss(
            hidden.flatten(0, 1), weight, targets.flatten(), self.config.loss, self.config.chunk_rows
        )

    def executed_fraction(self) -> float:
        """Return the rows that the MLPs processed in the last pass ÷ those if every token ran every recursion."""
        config = self.config
        every = config.blocks * config.recursions * config.batch * config.seq_len
        executed: int = sum(block.executed_rows for block in self.blocks)
        return executed / every


def forward_flops(config: HydraConfig) -> int | None:
    """Return the FLOPs of a forward pass by formula; None if tokens choose their depth."""
    if config.routing == "dynamic":
        return None
    tokens, dim, latent = config.batch * config.seq_len, config.dim, config.dim // 4
    head = latent // config.heads
    kv = head * config.kv_heads
    convolutions = CausalConvs.TAPS * (latent * head + latent * latent + kv * head + kv * kv)
    weights_per_token = dim * (latent + 2 * kv) + latent * dim + convolutions + dim
    num_kept = config.batch * max(1, round(config.capacity * config.seq_len))
    num_routed = _num_routed(config) if num_kept < tokens else 0
    attention = 2 * config.batch * config.seq_len**2 * latent  # 4·S²·latent, and causal: half
    mlp_rows = config.recursions * (num_routed * num_kept + (config.blocks - num_routed) * tokens)
    return (
        config.blocks * (2 * tokens * weights_per_token + attention)
        + 2 * tokens * num_routed * dim
        + 2 * mlp_rows * 3 * dim * mlp_width(dim)
        + 2 * tokens * dim * config.vocab
    )


def _num_routed(config: HydraConfig) -> int:
    return max(0, config.blocks - 2)


def build(config: HydraConfig) -> Built:
    if config.dim % (8 * config.heads):
        raise UsageError(
            f"dim={config.dim}: must be a multiple of 8 × heads ({8 * config.heads}), because RoPE needs pairs"
        )
    if config.heads % config.kv_heads:
        raise UsageError(f"kv_heads={config.kv_heads}: must divide heads ({config.heads})")
    if not 0 < config.capacity <= 1:
        raise UsageError(f"capacity={config.capacity}: must be above 0 and at most 1")
    if config.chunk_rows < 1:
        raise UsageError(f"chunk_rows={config.chunk_rows}: must be at least 1")
    module = Hydra(config)
    proofs = [loss_proof(f"loss={config.loss}", config.loss)]
    if config.routing == "dynamic" and config.dispatch == "gather":
        proofs.append(Proof(claim="routing=dynamic", shows=_fewer_rows))
    if config.capacity < 1 and _num_routed(config):
        proofs.append(ran(f"capacity={config.capacity}", "topk", at_least=_num_routed(config)))

    def batch() -> Batch:
        words = torch.randint(config.vocab, (config.batch, config.seq_len + 1))
        return {"tokens": words[:, :-1], "targets": words[:, 1:]}

    return Built(
        module=module,
        batch=batch,
        num_tokens=config.batch * config.seq_len,
        forward_flops=forward_flops(config),
        proofs=tuple(proofs),
        facts=lambda: {"executed_fraction": module.executed_fraction()},
    )


def _fewer_rows(evidence: Evidence) -> str | None:
    fraction, sorts = evidence.facts.get("executed_fraction", 1.0), evidence.calls("sort")
    return f"executed fraction {fraction:.3f}, sort ×{sorts}" if sorts and fraction < 1 else None


TINY: Mapping[str, int] = {
    "dim": 64, "blocks": 3, "recursions": 3, "heads": 4, "kv_heads": 2, "vocab": 256, "batch": 2, "seq_len": 64,
}  # fmt: skip

WORKLOAD = Workload(
    name="hydra",
    about="recursive blocks with compressed attention; static or dynamic depth, top-k capacity, three losses",
    config=HydraConfig,
    presets={
        # The default first, the others by size.
        "100m": {"dim": 768, "blocks": 8, "recursions": 4, "heads": 12, "kv_heads": 3},
        "tiny": TINY,
        "debug": {"dim": 512, "blocks": 2, "recursions": 2, "heads": 8, "kv_heads": 2},
        "50m": {"dim": 512, "blocks": 8, "recursions": 3, "heads": 8, "kv_heads": 2},
        "250m": {"dim": 1024, "blocks": 10, "recursions": 4, "heads": 16, "kv_heads": 4},
        "500m": {"dim": 1792, "blocks": 14, "recursions": 4, "heads": 28, "kv_heads": 4},
        "1b": {"dim": 1792, "blocks": 20, "recursions": 4, "heads": 28, "kv_heads": 4},
        "1.5b": {"dim": 2048, "blocks": 22, "recursions": 4, "heads": 32, "kv_heads": 4},
    },
    build=build,
    reference={"dispatch": "mask", "loss": "full", "gqa": "repeated", "checkpoint": 0},
    alternatives={"routing": (("static",), ("dynamic",)), "capacity": ((1.0,),)},
    gate={**TINY, "seq_len": 32, "chunk_rows": 24},
)
