"""One mixture-of-experts layer with six ways to dispatch tokens to experts and back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from stepscope.workloads import experts
from stepscope.workloads.experts import ExpertKnobs, MixtureOfExperts
from stepscope.workloads.ops.random_rows import built_over_rows
from stepscope.workloads.workload import Built, Workload, knob


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(ExpertKnobs):
    width: int = knob(768, "width of a token")
    d_shared: int = knob(3072, "hidden width of the shared expert")
    seq_len: int = knob(4096, "tokens per sequence")
    batch: int = knob(16, "sequences per batch")


class Layer(nn.Module):
    """x → the layer's output and its balance loss."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(config.width, config.d_shared, config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, balance = self.moe(x)
        return out, balance


def build(config: MoeConfig) -> Built:
    """Return the layer, with normally distributed inputs."""
    layer, tokens = Layer(config), config.batch * config.seq_len
    products = config.experts + 1 + 2 * (config.top_k * config.d_expert + config.d_shared)
    built = built_over_rows(layer, config, forward_flops=2 * config.width * products * tokens)
    return experts.with_experts(built, [layer.moe], config)


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
    gate={**experts.GATE, "width": 32, "d_shared": 48, "seq_len": 48, "batch": 2},
)
