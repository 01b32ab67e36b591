"""tsmoe: a time-series decoder with a mixture of experts in every block and forecasts at four horizons."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads.models.layers import RMSNorm, num_masks, rope, rope_tables, run_blocks
from stepscope.workloads.ops import moe as experts
from stepscope.workloads.ops.attention import causal_mask
from stepscope.workloads.ops.moe import ExpertKnobs, MixtureOfExperts
from stepscope.workloads.workload import Built, Evidence, Proof, Workload, knob

HORIZONS = (1, 8, 32, 64)
HUBER_DELTA = 2.0
BALANCE_WEIGHT = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ExpertKnobs):
    d_model: int = knob(768, "width of the model")
    layers: int = knob(12, "blocks")
    heads: int = knob(12, "attention heads")
    d_ff: int = knob(3072, "hidden width of the shared expert")
    mask: Literal["causal", "given", "inverted"] = knob(
        "causal",
        "how attention hides keys: is_causal; a bool mask that includes padding; that mask inverted, which is wrong",
    )
    seq_len: int = knob(4096, "points per series")
    batch: int = knob(16, "series per batch")
    checkpoint: int = knob(0, "recompute every k-th block in the backward pass; 0: none")


class Attention(nn.Module):
    """Causal attention with RoPE; qkv in one projection with bias, the output without."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """n = RMSNorm(x); h = RMSNorm(Attn(n) + n); h + MoE(h)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.d_model), RMSNorm(config.d_model)
        self.attention = Attention(config.d_model, config.heads)
        self.moe = MixtureOfExperts(config.d_model, config.d_ff, config)

    def forward(
        self, state: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, balance = state
        n = self.norm1(x)
        h = self.norm2(self.attention(n, cos, sin, mask) + n)
        routed, of_block = self.moe(h)
        return h + routed, balance + of_block


class TimeSeriesMoE(nn.Module):
    """series [B, T] → forecasts [B, T, h] of the next h points for every horizon h, or with targets the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_gate = nn.Linear(1, config.d_model, bias=False)
        self.embed_value = nn.Linear(1, config.d_model, bias=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.heads = nn.ModuleList(nn.Linear(config.d_model, horizon) for horizon in HORIZONS)

    def forward(self, series: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        points = series[..., None].to(self.embed_gate.weight.dtype)
        x = functional.silu(self.embed_gate(points)) * self.embed_value(points)
        cos, sin = rope_tables(series.shape[1], self.config.d_model // self.config.heads, points)
        start = torch.zeros((), device=x.device, dtype=cos.dtype)
        mask = None if self.config.mask == "causal" else given_mask(series, self.config.mask == "inverted")
        x, balance = run_blocks(self.blocks, (x, start), cos, sin, mask, checkpoint_every=self.config.checkpoint)
        forecasts = tuple(head(x) for head in self.heads)
        if targets is None:
            return forecasts
        error = torch.stack([huber(forecast, targets) for forecast in forecasts]).mean()
        return error + BALANCE_WEIGHT * balance / self.config.layers


def given_mask(series: Tensor, is_inverted: bool) -> Tensor:
    """Return a bool mask [B, 1, T, T], like programs with padding use: True where a query sees a key.

    Inverted, True means hidden, as in other libraries; with SDPA each query then sees only later keys.
    """
    is_real = torch.ones_like(series, dtype=torch.bool)
    seen = is_real[:, None, None, :] & causal_mask(series.shape[1], series.device)
    return ~seen if is_inverted else seen


def _mask_proof(config: Config) -> Proof:
    def shows(evidence: Evidence) -> str | None:
        masks = num_masks(evidence)
        return f"attention with masks ×{masks}" if masks >= config.layers else None

    return Proof(claim=f"mask={config.mask}", shows=shows)


def huber(forecast: Tensor, targets: Tensor) -> Tensor:
    """Return the mean Huber loss of forecast [B, T, h]: `forecast[:, t, j]` predicts `targets[:, t + j]`, and
    predictions past the end are ignored."""
    length, horizon = forecast.shape[1:]
    wide = forecast.to(torch.promote_types(forecast.dtype, torch.float32))
    future = functional.pad(targets.to(wide.dtype), (0, horizon - 1)).unfold(1, horizon, 1)
    steps = torch.arange(length, device=targets.device)[:, None] + torch.arange(horizon, device=targets.device)
    inside = (steps < length).to(wide.dtype)
    losses = functional.huber_loss(wide, future, reduction="none", delta=HUBER_DELTA)
    return (losses * inside).sum() / (inside.sum() * targets.shape[0])


def forward_flops(config: Config) -> int:
    """Return the model FLOPs of a forward pass: embedding, projections, half of S² attention, experts, heads."""
    d, tokens = config.d_model, config.batch * config.seq_len
    attention = 2 * 4 * d * d + 2 * config.seq_len * d
    moe = 2 * d * (config.experts + 1) + 4 * d * (config.top_k * config.d_expert + config.d_ff)
    return tokens * (2 * 2 * d + config.layers * (attention + moe) + 2 * d * sum(HORIZONS))


def build(config: Config) -> Built:
    """Return the model, with random walks as data."""
    if config.d_model % (2 * config.heads):
        raise UsageError(f"d_model={config.d_model}: must be a multiple of 2 × heads ({2 * config.heads})")
    model = TimeSeriesMoE(config)

    def batch() -> Mapping[str, Tensor]:
        # Scaled to a standard deviation of about 1 at any length.
        steps = torch.randn(config.batch, config.seq_len + 1)
        walk = steps.cumsum(1) * config.seq_len**-0.5
        return {"series": walk[:, :-1].contiguous(), "targets": walk[:, 1:].contiguous()}

    built = Built(
        module=model,
        batch=batch,
        num_tokens=config.batch * config.seq_len,
        forward_flops=forward_flops(config),
        proofs=() if config.mask == "causal" else (_mask_proof(config),),
    )
    return experts.with_experts(built, [block.moe for block in model.blocks], config)


WORKLOAD = Workload(
    name="tsmoe",
    about="time-series mixture of experts: six ways to dispatch tokens",
    config=Config,
    presets={
        "538m": {},
        "23m": {"d_model": 384, "d_ff": 192, "d_expert": 192},
        "tiny": {
            "d_model": 64, "layers": 2, "heads": 4, "experts": 4, "d_ff": 64, "d_expert": 64,
            "seq_len": 128, "batch": 2,
        },
    },
    build=build,
    reference={"dispatch": "loop", "mask": "causal", "gelu": "torch"},
    gate={**experts.GATE, "d_model": 32, "layers": 2, "heads": 2, "d_ff": 48, "seq_len": 48, "batch": 2},
)  # fmt: skip
