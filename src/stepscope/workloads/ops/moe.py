"""One mixture-of-experts layer: six ways to bring tokens to their experts and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepscope.workloads import experts, gelu
from stepscope.workloads.experts import Dispatch, MixtureOfExperts, Routing
from stepscope.workloads.gelu import Gelu
from stepscope.workloads.workload import Built, Workload, knob


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """The knobs of one layer."""

    width: int = knob(768, "width of a token")
    experts: int = knob(8, "experts, the shared one not counted")
    top_k: int = knob(2, "experts that a token is routed to")
    d_expert: int = knob(3072, "hidden width of a routed expert")
    d_shared: int = knob(3072, "hidden width of the shared expert")
    dispatch: Dispatch = knob("loop", "how tokens come to their experts and back")  # noqa: RUF009
    capacity_factor: float = knob(1.25, "rows of an expert over the mean, with dispatch=capacity; more are dropped")
    routing: Routing = knob("learned", "by the router, or balanced: by a hash, evenly")  # noqa: RUF009
    gelu: Gelu = knob("torch", "kept: one kernel each way, its output kept for the backward pass")  # noqa: RUF009
    seq_len: int = knob(4096, "tokens of a sequence")
    batch: int = knob(16, "sequences in a batch")


class Layer(nn.Module):
    """x → the layer's output and its balance loss."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(
            config.width,
            num_experts=config.experts,
            top_k=config.top_k,
            expert_width=config.d_expert,
            shared_width=config.d_shared,
            dispatch=config.dispatch,
            capacity_factor=config.capacity_factor,
            routing=config.routing,
            gelu=config.gelu,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, balance = self.moe(x)
        return out, balance


def build(config: MoeConfig) -> Built:
    """The layer and normal numbers that ask for a gradient."""
    layer = Layer(config)

    def batch() -> Mapping[str, Tensor]:
        return {"x": torch.randn(config.batch, config.seq_len, config.width).requires_grad_()}

    tokens, idle = config.batch * config.seq_len, config.experts - config.top_k
    products = config.experts + 1 + 2 * (config.top_k * config.d_expert + config.d_shared)
    return Built(
        module=layer,
        batch=batch,
        num_tokens=tokens,
        forward_flops=2 * config.width * products * tokens,
        num_active_parameters=sum(p.numel() for p in layer.parameters()) - idle * 2 * config.width * config.d_expert,
        proofs=(experts.proof(config.dispatch, 1, config.experts), *gelu.proofs(config.gelu, 2)),
        facts=lambda: experts.facts([layer.moe]),
    )


WORKLOAD = Workload(
    name="moe",
    about="one mixture-of-experts layer: six ways to dispatch tokens",
    config=MoeConfig,
    presets={
        "538m": {},
        "23m": {"width": 384, "d_expert": 192, "d_shared": 192},
        "tiny": {"width": 64, "experts": 4, "d_expert": 64, "d_shared": 64, "seq_len": 64, "batch": 2},
    },
    build=build,
    reference={"dispatch": "loop", "gelu": "torch"},
    # experts ÷ top_k as the capacity factor: no token is dropped, whatever the router does.
    gate={
        "width": 32,
        "experts": 4,
        "top_k": 2,
        "d_expert": 40,
        "d_shared": 48,
        "seq_len": 48,
        "batch": 2,
        "capacity_factor": 2.0,
    },
)
