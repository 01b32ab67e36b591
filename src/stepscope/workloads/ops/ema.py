"""Megalodon's complex moving average alone: by FFT, token by token, or as a parallel scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from stepscope.workloads.ema import CEMA, proofs
from stepscope.workloads.workload import Batch, Built, Workload, knob


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """x [batch, seq_len, width] → outputs of that shape and the last state."""

    batch: int = knob(8, "sequences per batch")
    seq_len: int = knob(8192, "tokens per sequence; fft pads them to the next power of two from 2·seq_len")
    width: int = knob(1024, "channels, each with its own moving average")
    num_states: int = knob(16, "complex states per channel")
    path: Literal["fft", "sequential", "scan"] = knob(
        "fft", "fft: convolution with the kernel; sequential: a loop over tokens; scan: one Triton kernel on a GPU"
    )
    with_state: bool = knob(False, "pass an incoming state, as when a sequence is continued")
    last_state: bool = knob(True, "also return the last state: free for scan, extra work for fft")


class Ema(nn.Module):
    """Returns outputs and, if requested, the last state [batch, width, num_states, 2]."""

    def __init__(self, config: EmaConfig) -> None:
        super().__init__()
        self.last_state = config.last_state
        self.ema = CEMA(config.width, config.num_states, config.path)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y, last = self.ema(x, state, self.last_state)
        return (y, last) if self.last_state else y


def forward_flops(num_tokens: int, width: int, num_states: int) -> int:
    """Return the FLOPs of the recurrence: 7 multiply-adds per state and token, 1 per channel and token.

    q·h is 4, p·x is 1 and Re γ·h is 2; ω·x is the other.
    """
    return 2 * num_tokens * width * (7 * num_states + 1)


def build(config: EmaConfig) -> Built:
    """Return the moving average, with normally distributed inputs."""

    def batch() -> Batch:
        x = torch.randn(config.batch, config.seq_len, config.width).requires_grad_()
        if not config.with_state:
            return {"x": x}
        return {"x": x, "state": torch.randn(config.batch, config.width, config.num_states, 2).requires_grad_()}

    return Built(
        module=Ema(config),
        batch=batch,
        num_tokens=config.batch * config.seq_len,
        forward_flops=forward_flops(config.batch * config.seq_len, config.width, config.num_states),
        proofs=proofs("path", config.path, config.seq_len),
    )


SMALL = {"batch": 2, "seq_len": 96, "width": 16, "num_states": 4}

WORKLOAD = Workload(
    name="ema",
    about="megalodon's complex moving average: FFT, a loop over tokens, or a fused scan",
    config=EmaConfig,
    presets={"default": {}, "tiny": SMALL},
    build=build,
    reference={"path": "sequential"},
    gate={**SMALL, "seq_len": 200},
)
