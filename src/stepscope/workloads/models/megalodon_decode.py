"""The next token of megalodon, from its decoding state or from all tokens again.

Not in the list of workloads; run `stepscope bench stepscope.workloads.models.megalodon_decode:WORKLOAD`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from stepscope.errors import UsageError
from stepscope.workloads.models import megalodon
from stepscope.workloads.models.megalodon import Megalodon, MegalodonConfig, State
from stepscope.workloads.workload import Batch, Built, Evidence, Proof, Workload, knob


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig(MegalodonConfig):
    """Megalodon, and how it computes the logits after the last of seq_len tokens."""

    cache: Literal["on", "off"] = knob(
        "on", "on: the last token continues the decoding state; off: all tokens run again"
    )


class Decode(nn.Module):
    """Tokens [batch, seq_len] → logits [batch, vocab] after the last token. The first call creates the state."""

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__()
        self.model = Megalodon(config)
        self.cache = config.cache
        self.num_computed = 0
        self._state: State | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.cache == "off":
            self.num_computed = tokens.shape[1]
            return self.model(tokens)[:, -1]
        if self._state is None:
            with torch.no_grad():
                self._state = self.model.decode(tokens[:, :-1])[1]
        self.num_computed = 1
        return self.model.decode(tokens[:, -1:], self._state)[0][:, -1]


def build(config: DecodeConfig) -> Built:
    if config.seq_len < 2:
        raise UsageError(f"seq_len={config.seq_len}: decoding needs at least 2 tokens")
    module = Decode(config)

    def shows(evidence: Evidence) -> str | None:
        computed = int(evidence.facts["num_computed_tokens"])
        is_so = computed == (1 if config.cache == "on" else config.seq_len)
        return f"{computed} of {config.seq_len} tokens computed" if is_so else None

    def batch() -> Batch:
        return {"tokens": torch.randint(config.vocab, (config.batch, config.seq_len))}

    return Built(
        module=module,
        batch=batch,
        num_tokens=config.batch,
        proofs=(Proof(claim=f"cache={config.cache}", shows=shows),),
        facts=lambda: {"num_computed_tokens": float(module.num_computed)},
    )


WORKLOAD = Workload(
    name="megalodon_decode",
    about="the next token of megalodon, with and without its decoding state; for mode=inference",
    config=DecodeConfig,
    presets=megalodon.WORKLOAD.presets,
    build=build,
    reference={"cache": "off", "ema": "sequential", "attention": "builtin"},
    gate={**megalodon.TINY, "seq_len": 80},
)
