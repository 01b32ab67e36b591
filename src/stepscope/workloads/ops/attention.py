"""Attention over given queries, keys and values: written out, compiled, or one SDPA back end and no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.workloads.ops.attention_bytes import Given, gradient_bytes, held_bytes
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
    implementation: Literal["naive", "builtin", "custom", "compiled", "flash", "efficient", "math", "cudnn"] = knob(
        "naive",
        "naive: einsum and a hand-written softmax; builtin: torch.softmax; custom: a backward of its own from the "
        "weights alone; compiled: naive through torch.compile; the rest: that SDPA back end alone, an error where it "
        "cannot run",
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


class KeptWeights(torch.autograd.Function):
    """Attention whose backward is written out. It keeps one seq_len² tensor, the weights, and not even the mask."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        weights = torch.softmax(masked_scores(query, key, mask), dim=-1)
        ctx.save_for_backward(query, key, value, weights)
        return torch.einsum("...qk,...kd->...qd", weights, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, weights = ctx.saved_tensors
        (gradient,) = gradients
        of_value = torch.einsum("...qk,...qd->...kd", weights, gradient)
        of_weights = torch.einsum("...qd,...kd->...qk", gradient, value)
        # Of a softmax y: y·(g − Σ g·y). Where the mask is, y is 0 and so is this.
        inner = (gradient * torch.einsum("...qk,...kd->...qd", weights, value)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - inner) / query.shape[-1] ** 0.5
        of_query = torch.einsum("...qk,...kd->...qd", of_scores, key)
        return of_query, torch.einsum("...qk,...qd->...kd", of_scores, query), of_value, None


class Attention(nn.Module):
    """Attention by one implementation."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.implementation, self.causal = config.implementation, config.causal
        compiled = config.implementation == "compiled"
        self.naive = torch.compile(naive_attention, dynamic=False) if compiled else naive_attention
        self.item_bytes: int | None = None
        """Of an element of the last pass's query."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.item_bytes = query.element_size()
        if self.implementation in BACKENDS:
            return self.forced(query, key, value)
        mask = causal_mask(query.shape[-2], query.device) if self.causal else None
        if self.implementation == "custom":
            return cast("Tensor", KeptWeights.apply(query, key, value, mask))
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
    is_other = evidence.calls("scaled_dot_product", KeptWeights.__name__)
    return f"softmax ×{calls}, no SDPA" if calls and not is_other else None


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
    "custom": ran("implementation=custom", KeptWeights.__name__),
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


def byte_facts(config: AttentionConfig, item_bytes: int | None) -> Mapping[str, float]:
    """Bytes that the algorithm holds when the backward begins, by tensor (`tensor_query_bytes` …) and in all
    (`theory_bytes`), and those of the gradients it then makes; empty where a compiler decides."""
    if item_bytes is None:
        return {}
    given = Given(
        implementation=config.implementation, batch=config.batch, heads=config.heads, seq_len=config.seq_len,
        head_width=config.head_width, item_bytes=item_bytes, causal=config.causal,
    )  # fmt: skip
    held = held_bytes(given)
    if held is None:
        return {}
    tensors = {f"tensor_{name}_bytes": float(num_bytes) for name, num_bytes in held.items()}
    return {"theory_bytes": float(sum(held.values())), **tensors, "tensor_gradients_bytes": gradient_bytes(given)}


def build(config: AttentionConfig) -> Built:
    """Attention and a batch of normal queries, keys and values that ask for gradients."""
    shape = (config.batch, config.heads, config.seq_len, config.head_width)

    def batch() -> Batch:
        return {name: torch.randn(shape).requires_grad_() for name in ("query", "key", "value")}

    module = Attention(config)
    return Built(
        module=module,
        batch=batch,
        num_tokens=config.batch * config.seq_len,
        forward_flops=forward_flops(config),
        proofs=(PROOFS[config.implementation],),
        facts=lambda: byte_facts(config, module.item_bytes),
        phases_apart=True,
    )


WORKLOAD = Workload(
    name="attention",
    about="softmax attention: written out, compiled, and every SDPA back end forced",
    config=AttentionConfig,
    presets={"default": {}, "tiny": {"batch": 2, "seq_len": 64, "head_width": 16}},
    build=build,
    mode="forward+backward",
    reference={"implementation": "naive"},
    gate={"batch": 2, "seq_len": 96},
)
