"""Attention over given queries, keys and values: written out, compiled, or one SDPA back end and no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.workloads.ops.softmax import handwritten_softmax
from stepscope.workloads.workload import CAPTURED, Batch, Built, Evidence, Proof, Workload, knob, ran

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
FUSED_ATTENTION = ("_flash_attention", "_efficient_attention", "_cudnn_attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Queries, keys and values [batch, heads, seq_len, head_width] → the values each query attends to."""

    head_width: Literal[16, 32, 64, 128] = knob(64, "width of a head")
    seq_len: int = knob(1024, "tokens in a sequence; scores are seq_len² a head")
    batch: int = knob(8, "sequences in a batch")
    heads: int = knob(1, "heads")
    causal: bool = knob(True, "a query sees no key after it")
    implementation: Literal["naive", "builtin", "compiled", "flash", "efficient", "math", "cudnn"] = knob(
        "naive",
        "naive: einsum and a hand-written softmax; builtin: torch.softmax; compiled: naive through torch.compile; "
        "the rest: that SDPA back end alone, an error where it cannot run",
    )


def causal_mask(length: int, device: torch.device) -> Tensor:
    """[length, length] bool, True where query i may see key j: j ≤ i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def masked_scores(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """q·k ÷ √width for every pair [..., queries, keys], −∞ where the mask is False."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / query.shape[-1] ** 0.5
    return scores if mask is None else torch.where(mask, scores, float("-inf"))


def naive_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention by its formula. Backward keeps three seq_len² tensors: masked scores, exponentials and weights."""
    weights = handwritten_softmax(masked_scores(query, key, mask))
    return torch.einsum("...qk,...kd->...qd", weights, value)


def builtin_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with torch.softmax. Backward keeps one seq_len² tensor: the weights."""
    weights = torch.softmax(masked_scores(query, key, mask), dim=-1)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    """Attention by one implementation."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.implementation, self.causal = config.implementation, config.causal
        compiled = config.implementation == "compiled"
        self.naive = torch.compile(naive_attention, dynamic=False) if compiled else naive_attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.implementation in BACKENDS:
            return self.forced(query, key, value)
        mask = causal_mask(query.shape[-2], query.device) if self.causal else None
        written_out = builtin_attention if self.implementation == "builtin" else self.naive
        return written_out(query, key, value, mask)

    def forced(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        try:
            with sdpa_kernel(BACKENDS[self.implementation]):
                return functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        except RuntimeError as error:
            # torch's words for "the only one allowed cannot run", on a GPU and on a CPU.
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            inputs = f"{query.dtype}, head width {query.shape[-1]}, on {query.device.type}"
            raise RuntimeError(f"SDPA back end '{self.implementation}' cannot run {inputs}: {error}") from error


def _naive_ran(evidence: Evidence) -> str | None:
    calls = evidence.written("amax")
    return f"amax ×{calls}, no SDPA" if calls and not evidence.calls("scaled_dot_product") else None


def _builtin_ran(evidence: Evidence) -> str | None:
    calls = evidence.written("softmax")
    return f"softmax ×{calls}, no SDPA" if calls and not evidence.calls("scaled_dot_product") else None


def math_attention_ran(evidence: Evidence) -> str | None:
    """What shows that SDPA took its math back end; compiled, that is taken apart into products and a softmax."""
    called = evidence.calls("_scaled_dot_product_attention_math")
    if called:
        return f"_scaled_dot_product_attention_math ×{called}"
    captured = evidence.ops.get(f"{CAPTURED}aten::scaled_dot_product_attention", 0)
    if not captured or evidence.calls(*FUSED_ATTENTION):
        return None
    return f"scaled_dot_product_attention ×{captured} compiled, no fused attention ran"


PROOFS = {
    "naive": Proof(claim="implementation=naive", shows=_naive_ran),
    "builtin": Proof(claim="implementation=builtin", shows=_builtin_ran),
    "compiled": ran("implementation=compiled", "Torch-Compiled Region"),
    "flash": ran("implementation=flash", "scaled_dot_product_flash_attention"),
    "efficient": ran("implementation=efficient", "scaled_dot_product_efficient_attention"),
    "math": Proof(claim="implementation=math", shows=math_attention_ran),
    "cudnn": ran("implementation=cudnn", "scaled_dot_product_cudnn_attention"),
}


def forward_flops(config: AttentionConfig) -> int:
    """Two products of 2·seq_len²·head_width FLOPs a head; causal attention needs half of each."""
    full = 4 * config.batch * config.heads * config.seq_len**2 * config.head_width
    return full // 2 if config.causal else full


def build(config: AttentionConfig) -> Built:
    """Attention and a batch of normal queries, keys and values that ask for gradients."""
    shape = (config.batch, config.heads, config.seq_len, config.head_width)

    def batch() -> Batch:
        return {name: torch.randn(shape).requires_grad_() for name in ("query", "key", "value")}

    return Built(
        module=Attention(config),
        batch=batch,
        num_tokens=config.batch * config.seq_len,
        forward_flops=forward_flops(config),
        proofs=(PROOFS[config.implementation],),
    )


WORKLOAD = Workload(
    name="attention",
    about="softmax attention: written out, compiled, and every SDPA back end forced",
    config=AttentionConfig,
    presets={"default": {}, "tiny": {"batch": 2, "seq_len": 64, "head_width": 16}},
    build=build,
    reference={"implementation": "naive"},
    gate={"batch": 2, "seq_len": 96},
)
