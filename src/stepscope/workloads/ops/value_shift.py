"""value_shift: shifts the second half of the channels by one token, in five equivalent ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads.ops.random_inputs import Function, built_over_rows
from stepscope.workloads.workload import Built, Evidence, Proof, Workload, knob


def _cat(v: Tensor) -> Tensor:
    now, before = v.chunk(2, dim=-1)
    shifted = torch.cat((torch.zeros_like(before[:, :1]), before[:, :-1]), dim=1)
    return torch.cat((now, shifted), dim=-1)


def pad(v: Tensor) -> Tensor:
    """Shift as hydra does: v [batch, length, width] → the same shape, starting with zeros."""
    now, before = v.chunk(2, dim=-1)
    return torch.cat((now, functional.pad(before, (0, 0, 1, -1))), dim=-1)


def _roll(v: Tensor) -> Tensor:
    now, before = v.chunk(2, dim=-1)
    shifted = before.roll(1, dims=1)
    shifted[:, 0] = 0  # the last token wrapped around to the front
    return torch.cat((now, shifted), dim=-1)


def _copy(v: Tensor) -> Tensor:
    half = v.shape[-1] // 2
    out = torch.empty_like(v)
    out[..., :half] = v[..., :half]
    out[:, 0, half:] = 0
    out[:, 1:, half:] = v[:, :-1, half:]
    return out


def _gather(v: Tensor) -> Tensor:
    now, before = v.chunk(2, dim=-1)
    token = torch.arange(v.shape[1], device=v.device)
    shifted = before.index_select(1, (token - 1).clamp(min=0))
    return torch.cat((now, shifted.masked_fill((token == 0)[:, None], 0)), dim=-1)


IMPLEMENTATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "cat": _cat, "pad": pad, "roll": _roll, "copy": _copy, "gather": _gather,
}  # fmt: skip
_TRACES = {"pad": "constant_pad_nd", "roll": "roll", "gather": "index_select"}
"""Ops that only that implementation calls. `cat` calls none of them; `copy` does not even call cat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueShiftConfig:
    batch: int = knob(4, "sequences per batch")
    seq_len: int = knob(4096, "tokens per sequence")
    width: int = knob(48, "channels of the value; the second half is shifted")
    implementation: Literal["cat", "pad", "roll", "copy", "gather"] = knob(
        "cat", "cat with zeros, pad and crop, roll and clear, copy into an empty tensor, or index_select"
    )


def _proof(implementation: str) -> Proof:
    def shows(evidence: Evidence) -> str | None:
        calls = {name: evidence.calls(part) for name, part in _TRACES.items()}
        own, joins = calls.pop(implementation, 0), evidence.calls("aten::cat", "_cat")
        if any(calls.values()):
            return None
        if implementation == "cat":
            return f"cat ×{joins}" if joins else None
        if implementation == "copy":
            copies = evidence.calls("aten::copy_", "_copy")
            return f"copy ×{copies}, no cat" if copies and not joins else None
        return f"{_TRACES[implementation]} ×{own}" if own else None

    return Proof(claim=f"implementation={implementation}", shows=shows)


def build(config: ValueShiftConfig) -> Built:
    if config.width % 2:
        raise UsageError(f"width={config.width}: must be even, because half of it is shifted")
    shift = Function(IMPLEMENTATIONS[config.implementation])
    return built_over_rows(shift, config, _proof(config.implementation), forward_flops=0)


WORKLOAD = Workload(
    name="value_shift",
    about="shift half of the value's channels by one token, five ways",
    config=ValueShiftConfig,
    presets={"hydra": {"seq_len": 4096, "width": 48}, "tiny": {"seq_len": 32, "width": 8}},
    build=build,
    mode="forward+backward",
    reference={"implementation": "cat"},
    gate={"batch": 2, "seq_len": 33, "width": 8},
)
