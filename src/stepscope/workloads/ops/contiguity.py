"""contiguity: what it costs a convolution if its input is a transposed slice of a wider tensor.

CCGQA's projection returns [batch, length, latent + 2·kv]; its query convolutions need [batch, latent, length]. The
slice can be passed as it is (the convolution copies it internally), made contiguous first (the same copy, explicit),
or padded (the copy that causality needs anyway; what the model does).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads.models.hydra import CausalConvs
from stepscope.workloads.ops.random_inputs import built_over
from stepscope.workloads.workload import Built, Evidence, Proof, Workload, knob


@dataclass(frozen=True, kw_only=True, slots=True)
class ContiguityConfig:
    batch: int = knob(4, "sequences per batch")
    seq_len: int = knob(4096, "tokens per sequence")
    dim: int = knob(768, "width of the model; the convolutions use a quarter of it")
    heads: int = knob(12, "query heads, the groups of the first convolution")
    kv_heads: int = knob(3, "key and value heads, the rest of the projection")
    implementation: Literal["sliced", "contiguous", "padded"] = knob(
        "sliced", "pass the transposed slice, a contiguous copy, or a padded copy to the convolution"
    )


class SlicedConvs(nn.Module):
    """The two causal convolutions of CCGQA's queries, applied to the projection's output."""

    def __init__(self, config: ContiguityConfig) -> None:
        super().__init__()
        self.latent, self.implementation = config.dim // 4, config.implementation
        self.convs = CausalConvs(self.latent, config.heads)
        self.input_contiguous: bool | None = None
        """Whether the first convolution's input was contiguous in the last pass."""

    def forward(self, projected: Tensor) -> Tensor:
        """projected [batch, seq_len, latent + 2·kv] → convolved queries [batch, latent, seq_len]."""
        x = projected[..., : self.latent].transpose(1, 2)
        first, second = self.convs.within_heads, self.convs.across_heads
        reach = 2 * (CausalConvs.TAPS - 1)
        if self.implementation == "padded":
            x = functional.pad(x, (reach, 0))
        elif self.implementation == "contiguous":
            x = x.contiguous()
        self.input_contiguous = x.is_contiguous()
        if self.implementation == "padded":
            return second(first(x))
        # The convolution pads both ends; the far end would see the future and is removed.
        widened = functional.conv1d(x, first.weight, padding=reach, groups=first.groups)
        return second(widened[..., : x.shape[-1] + CausalConvs.TAPS - 1])


def _proof(implementation: str) -> Proof:
    def shows(evidence: Evidence) -> str | None:
        contiguous, pads = evidence.facts.get("input_contiguous"), evidence.calls("constant_pad_nd")
        expected = {"sliced": (0.0, False), "contiguous": (1.0, False), "padded": (1.0, True)}[implementation]
        word = "contiguous" if contiguous else "strided"
        return f"{word} input, constant_pad_nd ×{pads}" if (contiguous, pads > 0) == expected else None

    return Proof(claim=f"implementation={implementation}", shows=shows)


def build(config: ContiguityConfig) -> Built:
    if config.dim % (4 * config.heads):
        raise UsageError(f"dim={config.dim}: must be a multiple of 4 × heads ({4 * config.heads})")
    latent = config.dim // 4
    head_width = latent // config.heads
    module = SlicedConvs(config)

    def facts() -> Mapping[str, float]:
        return {} if module.input_contiguous is None else {"input_contiguous": float(module.input_contiguous)}

    shape = (config.batch, config.seq_len, latent + 2 * config.kv_heads * head_width)
    flops = 2 * config.batch * config.seq_len * CausalConvs.TAPS * latent * (head_width + latent)
    proof = _proof(config.implementation)
    return built_over(module, config, {"projected": shape}, proof, forward_flops=flops, facts=facts)


WORKLOAD = Workload(
    name="contiguity",
    about="causal convolutions on a transposed slice, on a contiguous copy, or on a padded one",
    config=ContiguityConfig,
    presets={
        "hydra": {"dim": 768, "heads": 12, "kv_heads": 3},
        "tiny": {"dim": 64, "heads": 4, "kv_heads": 2, "seq_len": 32},
    },
    build=build,
    reference={"implementation": "contiguous"},
    gate={"dim": 64, "heads": 4, "kv_heads": 2, "batch": 2, "seq_len": 24},
)
