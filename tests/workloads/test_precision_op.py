"""The precision op: known roundings, exactly."""

from __future__ import annotations

import pytest
import torch
from evidence import evidence_of

from stepscope.workloads.ops.precision import WORKLOAD


def run(preset="fp32", **values):
    torch.manual_seed(0)
    built = WORKLOAD.build(WORKLOAD.configure(preset, **values))
    with torch.no_grad():
        built.module(**built.batch())
    return built.facts()


@pytest.mark.parametrize(
    ("preset", "result"),
    [
        # The classic: a thousand hundredths. In bf16 the sum stands still at 4, where 0.01 is less than half a step.
        ("fp32", 10.000133514404297),
        ("fp16", 9.953125),
        ("bf16", 4.0),
        ("mixed", 10.00213623046875),
    ],
)
def test_a_thousand_hundredths(preset, result):
    facts = run(preset)

    assert facts["result"] == result and facts["exact"] == 10.0
    assert facts["largest_error"] == abs(result - 10.0)


def test_float64_is_as_exact_as_it_gets():
    facts = run(value_dtype="fp64", accumulate_dtype="fp64")

    assert facts["largest_error"] < 1e-6  # the batch is float32: 0.01 itself is off by 2e-10


@pytest.mark.parametrize("experiment", ["matmul", "norm", "reduction"])
def test_wider_is_nearer(experiment):
    errors = [run(p, experiment=experiment)["relative_error"] for p in ("bf16", "fp16", "mixed", "fp32")]

    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-4 and errors[3] < 1e-6


def test_a_sum_of_squares_overflows_in_fp16():
    assert run("fp16", experiment="norm", scale=300.0)["relative_error"] == 1.0  # x ÷ √∞
    assert run("fp16", experiment="matmul", scale=300.0)["not_finite"] > 0
    assert run("mixed", experiment="norm", scale=300.0)["relative_error"] < 1e-3


@pytest.mark.parametrize("experiment", ["accumulate", "matmul", "norm", "reduction"])
@pytest.mark.parametrize("preset", ["fp16", "bf16", "mixed"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_it_has_a_backward_and_a_proof(experiment, preset):
    built = WORKLOAD.build(WORKLOAD.configure(preset, experiment=experiment, terms=70, rows=4))
    evidence = evidence_of(built)

    (proof,) = built.proofs
    assert proof.claim.startswith("accumulate_dtype=") and "×" in proof.shows(evidence)


def test_no_proof_when_it_was_accumulated_in_something_else():
    built = WORKLOAD.build(WORKLOAD.configure("fp16", experiment="reduction"))
    evidence = evidence_of(built)
    built.module.last = (torch.ones(1), torch.ones(1))  # float32

    assert built.proofs[0].shows(evidence) is None


def test_the_products_flops():
    from torch.utils.flop_counter import FlopCounterMode

    built = WORKLOAD.build(WORKLOAD.configure(experiment="matmul", terms=130, rows=16))
    with FlopCounterMode(display=False) as counter:
        built.module(**built.batch())

    assert built.forward_flops == counter.get_total_flops()


def test_the_audit_counts_what_answered_in_which_dtype():
    built = WORKLOAD.build(WORKLOAD.configure("bf16", experiment="audit", rows=8))
    evidence = evidence_of(built)

    assert built.facts()["linear_bf16"] == 2 and built.facts()["residual_fp32"] == 2
    assert sum(built.facts().values()) == 8 and built.facts()["loss_fp32"] == 1
    assert built.proofs[0].shows(evidence) == "linear_bf16 ×2"

    plain = WORKLOAD.build(WORKLOAD.configure("fp32", experiment="audit", rows=8))
    plain.module(**plain.batch())
    assert plain.facts() == {"norm_fp32": 2, "linear_fp32": 2, "residual_fp32": 2, "softmax_fp32": 1, "loss_fp32": 1}
    with torch.autocast("cpu", dtype=torch.float16):
        plain.module(**plain.batch())
    assert plain.facts()["linear_fp16"] == 2
