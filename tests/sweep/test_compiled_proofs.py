"""Proofs of compiled rows: attention's own names in the captured graph, not what a compiled loss is made of."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.recorder.compiler.compile_watch import CompilerProbe
from stepscope.sweep.checks.proofs import (
    CompiledGraphs,
    captured_ops,
    compiler_notes,
)
from stepscope.workloads.models import cs336, megalodon, nano
from stepscope.workloads.ops import moe as experts
from stepscope.workloads.ops.attention import math_attention_ran
from stepscope.workloads.ops.cross_entropy import loss_proof, next_token_loss
from stepscope.workloads.workload import CAPTURED, LOWERED, Evidence, ran

# torch's own, when it first imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CS336 = (cs336, ("naive", "builtin", "sdpa"), {"seq_len": 16})
NANO = (nano, ("dense", "sparse_mask"), {"seq_len": 128, "batch": 1})
MEGALODON = (megalodon, ("builtin", "sdpa"), {"seq_len": 64, "ema": "fft"})


def compiled_evidence(function, *arguments, **named):
    """What compiling leaves when no op is called by name: the graphs, captured and decomposed, without their code."""
    torch.compiler.reset()
    graphs = CompiledGraphs()
    graphs.start()
    try:
        with torch.no_grad():
            torch.compile(function, backend="aot_eager_decomp_partition")(*arguments, **named)
    finally:
        graphs.stop()
    return Evidence(device="cpu", ops=graphs.ops, kernels={}, facts={})


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "variants", "sizes", "ran_variant"),
    [*((*case, variant) for case in (CS336, NANO) for variant in case[1]), (*MEGALODON, "builtin")],
)
def test_a_compiled_model_with_a_loss_proves_its_attention_and_no_other(family, variants, sizes, ran_variant):
    built = {
        name: family.WORKLOAD.build(family.WORKLOAD.configure("tiny", attention=name, **sizes)) for name in variants
    }
    evidence = compiled_evidence(built[ran_variant].module, **built[ran_variant].batch())

    claims = {name: [p for p in one.proofs if p.claim.startswith("attention=")] for name, one in built.items()}
    assert evidence.calls(f"{LOWERED}aten::amax") > 0  # the loss, decomposed
    assert [name for name, (proof,) in claims.items() if proof.shows(evidence)] == [ran_variant]
    assert "×2" in claims[ran_variant][0].shows(evidence)  # two layers, each counted once


@pytest.mark.long
def test_a_compiled_full_loss_is_proven():
    inputs = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    evidence = compiled_evidence(next_token_loss, *inputs)

    assert loss_proof("loss=full", "full").shows(evidence) == "cross_entropy ×1"
    assert loss_proof("loss=fused", "fused").shows(evidence) is None


def test_the_three_witnesses_are_not_added_up():
    evidence = Evidence(
        device="cuda",
        ops={"aten::bmm": 2, f"{CAPTURED}aten::bmm": 3, f"{LOWERED}aten::bmm": 1},
        kernels={"bmm_kernel": 1},
        facts={},
    )

    assert evidence.calls("bmm") == 3 and evidence.written("bmm") == 3
    assert ran("x=y", "bmm", at_least=4).shows(evidence) is None
    assert ran("x=y", "fft", at_least=0).shows(evidence) is None


def test_a_model_without_layers_proves_nothing():
    nothing = Evidence(device="cpu", ops={}, kernels={}, facts={})

    for family, variants, sizes in (CS336, MEGALODON, NANO):
        for name in variants:
            built = family.WORKLOAD.build(family.WORKLOAD.configure("tiny", attention=name, layers=0, **sizes))
            assert not [proof.claim for proof in built.proofs if proof.shows(nothing)]


def test_the_batched_products_of_attention_are_not_those_of_capacity():
    attention = {"aten::bmm": 24, "aten::_scaled_dot_product_attention_math": 4}
    loop = {**attention, "aten::mm": 64, "aten::bincount": 4}
    tile = {**attention, "aten::mm": 64, "aten::searchsorted": 4, "aten::tensor_split": 8}
    proof = experts.proof("capacity", num_layers=4, num_experts=8)

    shown = [
        proof.shows(Evidence(device="cpu", ops=ops, kernels={}, facts={}))
        for ops in (attention, loop, tile, {"aten::bmm": 8, "aten::searchsorted": 4})
    ]
    assert shown == [None, None, None, "aten::bmm ×8, searchsorted ×4"]


def test_compiled_math_attention_is_shown_by_the_captured_call_alone():
    captured = {f"{CAPTURED}aten::scaled_dot_product_attention": 2}

    assert math_attention_ran(Evidence(device="cpu", ops=captured, kernels={}, facts={}))
    fused = {**captured, f"{LOWERED}aten::_scaled_dot_product_flash_attention_for_cpu": 2}
    assert math_attention_ran(Evidence(device="cpu", ops=fused, kernels={}, facts={})) is None
    assert math_attention_ran(Evidence(device="cpu", ops={}, kernels={}, facts={})) is None


def test_the_code_in_a_comment_is_no_call():
    graph = ' # File: model.py:3 in forward, code: y = x.softmax(-1)\n y: "f32[2]" = x.softmax(-1);  x = None\n'
    assert captured_ops(graph) == {f"{CAPTURED}aten::softmax": 1}


def test_what_ran_uncompiled_is_a_note_of_the_row() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    def refuses(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("this back end compiles nothing")

    run = {"compile": "default", "device": "cpu"}
    torch._dynamo.reset()
    probe = CompilerProbe()
    probe.start()
    try:
        torch.compile(halves, backend="eager")(torch.ones(2))
        clean = compiler_notes(probe, run)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            torch.compile(lambda x: x * 3, backend=refuses)(torch.ones(2))
        failed = compiler_notes(probe, run)
    finally:
        probe.stop()
        torch._dynamo.reset()
    assert clean == []
    assert len(failed) == 1 and failed[0].startswith("torch could not compile a part") and "nothing" in failed[0]


@pytest.mark.parametrize(("mode", "device", "has"), [("reduce-overhead", "cuda", 1), ("default", "cuda", 0)])
def test_the_pools_of_cuda_graphs_are_a_note_of_the_row(mode: str, device: str, has: bool) -> None:
    notes = compiler_notes(CompilerProbe(), {"compile": mode, "device": device})
    assert [note for note in notes if "see reserved" in note] == notes and len(notes) == has
