"""cross_entropy: the head and the loss alone, with the largest tensor of a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads.losses import CHUNK_ROWS, loss_proof, next_token_loss
from stepscope.workloads.workload import Batch, Built, Workload, knob


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossEntropyConfig:
    tokens: int = knob(16384, "rows of hidden states")
    width: int = knob(768, "width of a hidden state")
    vocab: int = knob(50257, "vocabulary size; the logits are tokens × vocab")
    implementation: Literal["full", "torch", "chunked", "fused"] = knob(
        "full", "float32 logits; logits in the head's dtype; chunks, recomputed; chunks with fused gradients"
    )
    chunk_rows: int = knob(CHUNK_ROWS, "rows of logits in memory at once in a chunked or fused loss")


class CrossEntropy(nn.Module):
    """A linear head and the mean cross entropy of its logits."""

    def __init__(self, config: CrossEntropyConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.vocab, config.width) * config.width**-0.5)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss of hidden [tokens, width] and targets [tokens], or the logits without targets."""
        if targets is None:
            return functional.linear(hidden, self.weight)
        if self.config.implementation == "torch":
            return functional.cross_entropy(functional.linear(hidden, self.weight), targets)
        return next_token_loss(hidden, self.weight, targets, self.config.implementation, self.config.chunk_rows)


def build(config: CrossEntropyConfig) -> Built:
    if config.chunk_rows < 1:
        raise UsageError(f"chunk_rows={config.chunk_rows}: must be at least 1")

    def batch() -> Batch:
        hidden = torch.randn(config.tokens, config.width, requires_grad=True)
        return {"hidden": hidden, "targets": torch.randint(config.vocab, (config.tokens,))}

    return Built(
        module=CrossEntropy(config),
        batch=batch,
        num_tokens=config.tokens,
        forward_flops=2 * config.tokens * config.width * config.vocab,
        proofs=(loss_proof(f"implementation={config.implementation}", config.implementation),),
    )


WORKLOAD = Workload(
    name="cross_entropy",
    about="linear head and cross entropy: full logits, chunked, or fused with gradients; compares memory",
    config=CrossEntropyConfig,
    presets={"hydra": {"tokens": 16384, "width": 768}, "tiny": {"tokens": 96, "width": 32, "vocab": 500}},
    build=build,
    reference={"implementation": "full"},
    gate={"tokens": 96, "width": 32, "vocab": 500, "chunk_rows": 40},
)
