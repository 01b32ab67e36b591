"""The precision op: known roundings, exactly."""

from __future__ import annotations

import math
from fractions import Fraction

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


def test_adding_halves_in_float32_is_the_same_with_and_without_the_cast():
    """Two ways to write it, one result: the cast is in the addition anyway."""
    term, total = torch.tensor(0.01, dtype=torch.float16), torch.zeros(())
    for _ in range(1000):
        total += term

    assert run("mixed")["result"] == float(total)
    # What is left is the half's own rounding of 0.01, a thousand times, and little more.
    assert abs(run("mixed")["result"] - 1000 * float(term)) < 1e-3 < abs(1000 * float(term) - 10.0)


@pytest.mark.parametrize("preset", ["fp16", "bf16", "mixed", "fp32"])
@pytest.mark.parametrize(("experiment", "num_exact"), [("matmul", 8 * 8), ("reduction", 8)])
def test_the_errors_are_against_the_exact_sum_of_the_same_numbers(preset, experiment, num_exact):
    """Held against fractions, which do not round."""
    torch.manual_seed(1)
    built = WORKLOAD.build(WORKLOAD.configure(preset, experiment=experiment, terms=96, rows=8))
    with torch.no_grad():
        built.module(**built.batch())
    x, *rest, result = built.module.last
    left = [[Fraction(float(value)) for value in row] for row in x]
    if rest:
        columns = [[Fraction(float(value)) for value in column] for column in rest[0].T]
        exact = [sum(a * b for a, b in zip(row, column)) for row in left for column in columns]
    else:
        exact = [sum(row) for row in left]
    errors = [abs(Fraction(float(value)) - truth) for value, truth in zip(result.flatten(), exact, strict=True)]
    norm = math.sqrt(sum(truth * truth for truth in exact))
    facts = built.facts()

    assert len(exact) == num_exact
    assert facts["largest_error"] == pytest.approx(float(max(errors)), rel=1e-6, abs=1e-12)
    relative = math.sqrt(sum(error * error for error in errors)) / norm
    assert facts["relative_error"] == pytest.approx(relative, rel=1e-6, abs=1e-13)
    # Of the size of the unit roundoff, 2⁻¹¹, 2⁻⁸, 2⁻²⁴; many roundings of one size take each other off.
    roundoff = {"fp16": 2**-11, "bf16": 2**-8, "mixed": 2**-11, "fp32": 2**-24}[preset]
    assert roundoff / (4 * math.sqrt(96)) < relative < 10 * roundoff


def test_the_norm_of_a_row_of_one_value_is_known():
    built = WORKLOAD.build(WORKLOAD.configure("fp32", experiment="norm", terms=64, rows=2))
    with torch.no_grad():
        built.module(torch.tensor([[3.0] * 64, [-0.5] * 64]))

    assert built.module.last[-1].tolist() == [[1.0] * 64, [-1.0] * 64]
    assert built.facts()["largest_error"] == 0.0


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
