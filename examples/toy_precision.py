"""The two-layer model of a well-known exercise in mixed precision: which of its parts compute in which dtype?

stepscope bench --check dtypes examples/toy_precision.py:build --dtype autocast_bf16
stepscope bench --check dtypes examples/toy_precision.py:build --dtype autocast_fp16 --device cuda
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ToyModel(nn.Module):
    """Two linear maps with a ReLU and a layer norm between them; with targets the cross entropy."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.relu(self.fc1(x))
        x = self.ln(x)
        logits: Tensor = self.fc2(x)
        return logits if targets is None else functional.cross_entropy(logits, targets)


def build(in_features: int = 20, out_features: int = 5, batch: int = 8):
    """The model, and a function that makes a batch for it."""

    def make_batch() -> dict[str, Tensor]:
        return {"x": torch.randn(batch, in_features), "targets": torch.randint(out_features, (batch,))}

    return ToyModel(in_features, out_features), make_batch
