"""Attention over given queries, keys and values: handwritten, compiled, or one forced SDPA backend."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.workloads.ops.random_inputs import built_over
from stepscope.workloads.ops.softmax import handwritten_softmax
from stepscope.workloads.workload import CAPTURED, Built, Evidence, Proof, Workload, knob, ran, wrote

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
FUSED = ("flash", "efficient", "cudnn")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Queries, keys and values [batch, heads, seq_len, head_width] → the values each query attends to."""

    head_width: Literal[16, 32, 64, 128] = knob(64, "width of a head")
    seq_len: int = knob(1024, "tokens per sequence; scores are seq_len² per head")
    batch: int = knob(8, "sequences per batch")
    heads: int = knob(1, "heads")
    causal: bool = knob(True, "a query does not see later keys")
    implementation: Literal["naive", "builtin", "custom", "compiled", "flash", "efficient", "math", "cudnn"] = knob(
        "naive",
        "naive: einsum and a handwritten softmax; builtin: torch.softmax; custom: its own backward pass; compiled: "
        "naive with torch.compile; others: only that SDPA backend, skipped if it cannot run",
    )


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return a bool mask [length, length], True where query i may see key j ≤ i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def masked_scores(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return q·k ÷ √width for every pair [..., queries, keys], −∞ where the mask is False."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / query.shape[-1] ** 0.5
    return scores if mask is None else torch.where(mask, scores, float("-inf"))


def naive_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention by formula. Keeps three seq_len² tensors: masked scores, exponentials and weights."""
    weights = handwritten_softmax(masked_scores(query, key, mask))
    return torch.einsum("...qk,...kd->...qd", weights, value)


def builtin_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention with torch.softmax. Keeps one seq_len² tensor: the weights."""
    weights = torch.softmax(masked_scores(query, key, mask), dim=-1)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class KeptWeights(torch.autograd.Function):
    """Attention with a handwritten backward pass. Keeps one seq_len² tensor, the weights, and no mask."""

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
        # The gradient of a softmax y is y·(g − Σ g·y); it is 0 where the mask hides a key.
        inner = (gradient * torch.einsum("...qk,...kd->...qd", weights, value)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - inner) / query.shape[-1] ** 0.5
        of_query = torch.einsum("...qk,...kd->...qd", of_scores, key)
        return of_query, torch.einsum("...qk,...qd->...kd", of_scores, query), of_value, None


class Attention(nn.Module):
    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.implementation, self.causal = config.implementation, config.causal
        compiled = config.implementation == "compiled"
        self.naive = torch.compile(naive_attention, dynamic=False) if compiled else naive_attention
        self.item_bytes: int | None = None  # bytes per element of the query in the last pass

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
            # What torch says if the only allowed backend cannot run, on a GPU and on a CPU.
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            inputs = f"{query.dtype}, head width {query.shape[-1]}, on {query.device.type}"
            raise RuntimeError(f"SDPA backend '{self.implementation}' cannot run {inputs}: {error}") from error


def math_attention_ran(evidence: Evidence) -> str | None:
    """Return what shows that SDPA used its math backend; compiled, it is decomposed into matmuls and a softmax."""
    called = evidence.calls("_scaled_dot_product_attention_math")
    if called:
        return f"_scaled_dot_product_attention_math ×{called}"
    captured = evidence.ops.get(f"{CAPTURED}aten::scaled_dot_product_attention", 0)
    if not captured or evidence.calls(*(f"_{name}_attention" for name in FUSED)):
        return None
    return f"scaled_dot_product_attention ×{captured} compiled, no fused attention ran"


PROOFS = {
    "naive": wrote("implementation=naive", "amax", without=("scaled_dot_product",), note=", no SDPA"),
    "builtin": wrote(
        "implementation=builtin", "softmax", without=("scaled_dot_product", KeptWeights.__name__), note=", no SDPA"
    ),
    "custom": ran("implementation=custom", KeptWeights.__name__),
    "compiled": ran("implementation=compiled", "Torch-Compiled Region"),
    "math": Proof(claim="implementation=math", shows=math_attention_ran),
    **{name: ran(f"implementation={name}", f"scaled_dot_product_{name}_attention") for name in FUSED},
}


def forward_flops(config: AttentionConfig) -> int:
    """Return the FLOPs of two matmuls of 2·seq_len²·head_width per head; causal attention needs half of each."""
    full = 4 * config.batch * config.heads * config.seq_len**2 * config.head_width
    return full // 2 if config.causal else full


def held_bytes(config: AttentionConfig, item_bytes: int) -> dict[str, int] | None:
    """Return bytes by tensor at the beginning of the backward; None if a compiler decides what is kept.

    All hold the inputs, the output and its gradient. Flash, memory-efficient and cuDNN attention add one number per
    query. Handwritten attention keeps seq_len² tensors. PyTorch's math backend computes half precision in float32 and
    keeps its own scaled or cast copies of query, key and value.

    >>> held = held_bytes(AttentionConfig(implementation="flash", seq_len=16384), item_bytes=2)
    >>> held["logsumexp"], sum(held.values())
    (524288, 84410368)
    """
    how, length = config.implementation, config.seq_len
    if how == "compiled":
        return None
    rows = config.batch * config.heads * length
    operand = rows * config.head_width * item_bytes
    held = dict.fromkeys(("query", "key", "value", "output", "output_gradient"), operand)
    if how in FUSED:
        if how == "efficient":  # padded to a multiple of 32 per sequence
            rows = config.batch * config.heads * -(-length // 32) * 32
        return {**held, "logsumexp": rows * torch.float32.itemsize}
    if how == "math":
        item = max(item_bytes, torch.float32.itemsize)
        copies = ("scaled_query", "scaled_key", *(("cast_value",) if item != item_bytes else ()))
        held |= dict.fromkeys(copies, rows * config.head_width * item)
        return {**held, "probabilities": rows * length * item}
    held["probabilities"] = rows * length * item_bytes
    if config.causal and how != "custom":
        held["mask"] = length * length
    if how == "naive":
        held |= dict.fromkeys(("scores", "exponentials"), rows * length * item_bytes)
        held |= dict.fromkeys(("maxima", "sums"), rows * item_bytes)
    return held


def byte_facts(config: AttentionConfig, item_bytes: int | None) -> Mapping[str, float]:
    """Return the bytes held when the backward begins, by tensor (`tensor_query_bytes` …) and in total
    (`theory_bytes`), and those of the gradients; empty if a compiler decides."""
    held = None if item_bytes is None else held_bytes(config, item_bytes)
    if held is None:
        return {}
    tensors = {f"tensor_{name}_bytes": float(num_bytes) for name, num_bytes in held.items()}
    # The gradients of query, key and value, each as large as the query.
    return {"theory_bytes": float(sum(held.values())), **tensors, "tensor_gradients_bytes": 3 * held["query"]}


def build(config: AttentionConfig) -> Built:
    module, shape = Attention(config), (config.batch, config.heads, config.seq_len, config.head_width)
    return built_over(
        module,
        config,
        dict.fromkeys(("query", "key", "value"), shape),
        PROOFS[config.implementation],
        forward_flops=forward_flops(config),
        facts=lambda: byte_facts(config, module.item_bytes),
        phases_apart=True,
    )


WORKLOAD = Workload(
    name="attention",
    about="softmax attention: handwritten, compiled, or with each SDPA backend",
    config=AttentionConfig,
    presets={"default": {}, "tiny": {"batch": 2, "seq_len": 64, "head_width": 16}},
    build=build,
    mode="forward+backward",
    reference={"implementation": "naive"},
    gate={"batch": 2, "seq_len": 96},
)
