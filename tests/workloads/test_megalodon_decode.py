"""The next token from the state and from all tokens: the same logits, one token computed, proofs that can fail."""

from __future__ import annotations

import pytest
import torch

from stepscope.errors import UsageError
from stepscope.workloads.models.megalodon_decode import WORKLOAD
from stepscope.workloads.registry import find
from stepscope.workloads.workload import Evidence


def built(**knobs):
    torch.manual_seed(0)
    return WORKLOAD.build(WORKLOAD.configure("tiny", **knobs))


@pytest.mark.long
@pytest.mark.parametrize("ema", ["fft", "sequential", "scan"])
@pytest.mark.parametrize("seq_len", [2, 33, 80])
def test_the_cache_changes_nothing_but_how_many_tokens_are_computed(ema, seq_len):
    tokens = torch.randint(256, (2, seq_len))
    with torch.inference_mode():
        on, off = (built(ema=ema, seq_len=seq_len, cache=value) for value in ("on", "off"))
        first, again = on.module(tokens), on.module(tokens)
        whole = off.module(tokens)

    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-5)
    assert torch.equal(first, again)  # the state is not used up
    assert (on.facts()["num_computed_tokens"], off.facts()["num_computed_tokens"]) == (1.0, float(seq_len))


def test_the_proof_is_how_many_tokens_were_computed():
    (proof,) = built(seq_len=64).proofs

    def shown(computed: int) -> str | None:
        return proof.shows(Evidence(device="cpu", ops={}, kernels={}, facts={"num_computed_tokens": computed}))

    assert proof.claim == "cache=on"
    assert shown(1) == "1 of 64 tokens computed" and shown(64) is None


def test_one_token_alone_is_refused_and_the_workload_is_found_by_its_module():
    with pytest.raises(UsageError, match="at least 2 tokens"):
        built(seq_len=1)
    assert find("stepscope.workloads.models.megalodon_decode:WORKLOAD").reference["cache"] == "off"
