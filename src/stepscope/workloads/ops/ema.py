"""The complex moving average of megalodon alone: by FFT, token by token, or by a parallel scan."""

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

    batch: int = knob(8, "sequences in a batch")
    seq_len: int = knob(8192, "tokens in a sequence; fft pads them to the power of two at or above 2·seq_len")
    width: int = knob(1024, "channels, each a moving average of its own")
    num_states: int = knob(16, "complex states of a channel")
    path: Literal["fft", "sequential", "scan"] = knob(
        "fft", "fft: convolution with the kernel; sequential: a loop over tokens; scan: one Triton kernel on a GPU"
    )
    with_state: bool = knob(False, "a state comes in, as it does when a sequence is continued")
    last_state: bool = knob(True, "the last state is returned too: free for a scan, a second contraction for fft")


class Ema(nn.Module):
    """Outputs and, where asked for, the last state [batch, width, num_states, 2]."""

    def __init__(self, config: EmaConfig) -> None:
        super().__init__()
        self.last_state = config.last_state
        self.ema = CEMA(config.width, config.num_states, config.path)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y, last = self.ema(x, state, self.last_state)
        return (y, last) if self.last_state else y


def forward_flops(num_tokens: int, width: int, num_states: int) -> int:
    """FLOPs of the recurrence, whatever the path: 7 multiply-adds a state and token, 1 a channel and token.

    q·h is 4, p·x is 1 and Re γ·h is 2; ω·x is the other.
    """
    return 2 * num_tokens * width * (7 * num_states + 1)


def build(config: EmaConfig) -> Built:
    """The moving average and a batch of normal numbers that ask for gradients."""

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
