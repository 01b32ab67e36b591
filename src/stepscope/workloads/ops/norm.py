"""RMS norm and layer norm: handwritten, torch's own, or handwritten and compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.workloads.ops.random_inputs import built_over_rows
from stepscope.workloads.workload import Built, Workload, knob, ran, wrote

EPS = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """x [batch, seq_len, width] → the same shape, every row of `width` normalized."""

    batch: int = knob(8, "sequences per batch")
    seq_len: int = knob(2048, "rows per sequence")
    width: int = knob(1024, "elements per row")
    kind: Literal["rms", "layer"] = knob(
        "rms", "rms: x ÷ root mean square; layer: subtracts the mean first, has a bias"
    )
    implementation: Literal["handwritten", "torch", "compiled"] = knob(
        "handwritten", "handwritten: op by op through memory; torch: functional.*_norm; compiled: fused"
    )


def handwritten_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x ÷ √(mean x² + eps) × weight over the last dimension, computed in float32 or wider, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS)
    return (wide * scale * weight).to(x.dtype)


def handwritten_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return (x − mean) ÷ √(variance + eps) × weight + bias over the last dimension, computed like RMS norm."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centered.pow(2).mean(dim=-1, keepdim=True) + EPS)
    return (centered * scale * weight + bias).to(x.dtype)


def torch_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return torch's own norm: layer norm with a bias, RMS norm without."""
    weight = weight.to(x.dtype)
    if bias is None:
        return functional.rms_norm(x, weight.shape, weight, EPS)
    return functional.layer_norm(x, weight.shape, weight, bias.to(x.dtype), EPS)


class Norm(nn.Module):
    """The norm of one kind and implementation; parameters `weight` and, for layer norm, `bias`."""

    def __init__(self, config: NormConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.width))
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.kind == "layer" else None
        handwritten: Callable[..., Tensor] = handwritten_rms_norm if config.kind == "rms" else handwritten_layer_norm
        self.norm = torch_norm if config.implementation == "torch" else handwritten
        if config.implementation == "compiled":
            self.norm = torch.compile(handwritten, dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight) if self.bias is None else self.norm(x, self.weight, self.bias)


PROOFS = {
    "handwritten": wrote(
        "implementation=handwritten", "rsqrt", unless_written=("rms_norm", "layer_norm"), note=", no norm op"
    ),
    "torch": ran("implementation=torch", "rms_norm", "layer_norm"),
    "compiled": ran("implementation=compiled", "Torch-Compiled Region"),
}


def build(config: NormConfig) -> Built:
    return built_over_rows(Norm(config), config, PROOFS[config.implementation])


WORKLOAD = Workload(
    name="norm",
    about="RMS norm and layer norm: handwritten, torch's kernel, or compiled",
    config=NormConfig,
    presets={"default": {}, "tiny": {"batch": 2, "seq_len": 16, "width": 64}},
    build=build,
    reference={"implementation": "handwritten"},
    gate={"batch": 2, "seq_len": 16, "width": 128},
)
