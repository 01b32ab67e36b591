"""FLOPs of a step from the ledger's facts, active parameters, and the share of the limit."""

from __future__ import annotations

import pytest

from handmade import flops_facts, op_flops
from stepscope.analysis.costs.flops import step_flops, utilization
from stepscope.devices import Ceilings, Device

DEVICE = Device(
    "Imaginary 1", {"fp32": 10**12, "bf16": 4 * 10**12}, 1 << 30, 10**9, "a sheet of paper, page 3", note=""
)
CEILINGS = Ceilings("Imaginary 1", {"fp32": 5 * 10**11}, 10**9, "2026-01-01T00:00:00+00:00", "2.13.0")


def weight(num_elements: int, forward_flops: int, looked_up: bool = False) -> dict:
    return {"num_elements": num_elements, "forward_flops": forward_flops, "looked_up": looked_up, "used": True}


def test_a_linear_layer_agrees_with_its_formula():
    found = step_flops(flops_facts(), None, num_tokens=512)

    assert found.model_flops == found.hardware_flops == 3_072_000 == 6 * 1000 * 512
    assert found.formula_flops == 3_072_000
    assert (found.recomputed_flops, found.has_backward, found.hidden) == (0, True, None)
    assert found.num_active_parameters == 1000


def test_recomputation_is_hardware_and_not_the_models():
    facts = flops_facts()
    facts["by_op"].append(op_flops("backward", 1_024_000, dtype="fp32", recomputed=True))
    found = step_flops(facts, None, 512)

    assert (found.model_flops, found.hardware_flops, found.recomputed_flops) == (3_072_000, 4_096_000, 1_024_000)


def test_inference_has_two_flops_a_parameter_and_token():
    facts = flops_facts(
        by_op=[op_flops("forward", 1_024_000, dtype="fp32")], model_flops_by_dtype={"fp32": 1_024_000}
    )
    found = step_flops(facts, None, 512)

    assert (found.has_backward, found.formula_flops) == (False, 2 * 1000 * 512)


def test_a_recomputed_forward_alone_is_no_backward():
    facts = flops_facts(by_op=[op_flops("backward", 5, recomputed=True)])

    assert not step_flops(facts, None, 512).has_backward


def test_dtypes_are_kept_apart():
    facts = flops_facts(
        by_op=[op_flops("forward", 100, "bf16"), op_flops("backward", 200, "bf16"), op_flops("other", 7, "fp32")],
        model_flops_by_dtype={"bf16": 300, "fp32": 7},
    )
    found = step_flops(facts, None, 1)

    assert found.hardware_flops_by_dtype == {"bf16": 300, "fp32": 7}
    assert found.model_flops == 307


def test_attention_is_added_to_the_formula():
    assert step_flops(flops_facts(forward_activation_flops=500), None, 512).formula_flops == 3 * (1_024_000 + 500)


def test_an_expert_counts_for_the_tokens_it_got():
    facts = flops_facts(weights=[weight(1000, 2 * 1000 * 512), weight(1000, 2 * 1000 * 128)])

    assert step_flops(facts, None, 512).num_active_parameters == 1000 + 250


def test_a_weight_used_twice_is_still_one_weight():
    facts = flops_facts(weights=[weight(1000, 2 * (2 * 1000 * 512))])

    assert step_flops(facts, None, 512).num_active_parameters == 1000


def test_an_embedding_is_active_but_multiplies_nothing():
    facts = flops_facts(weights=[weight(1000, 1_024_000), weight(300, 0, looked_up=True)])
    found = step_flops(facts, None, 512)

    assert (found.num_active_parameters, found.formula_flops) == (1300, 6 * 1000 * 512)


def test_a_tied_embedding_multiplies_as_the_head():
    facts = flops_facts(weights=[weight(1000, 1_024_000, looked_up=True)])

    assert step_flops(facts, None, 512).formula_flops == 6 * 1000 * 512


@pytest.mark.parametrize("num_tokens", [None, 0])
def test_without_tokens_there_is_no_formula(num_tokens):
    found = step_flops(flops_facts(), None, num_tokens)

    assert (found.formula_flops, found.num_active_parameters, found.model_flops) == (None, None, 3_072_000)


@pytest.mark.parametrize(
    ("facts", "trace", "said"),
    [
        ({"error": "aten.mm: odd"}, None, "an op could not be counted (aten.mm: odd)"),
        ({"compiled": True}, {"num_graph_launches": 2}, "CUDA graphs replay"),
        ({"compiled": True}, {"num_template_kernels": 2}, "Triton templates"),
        ({"compiled": True}, {"num_template_kernels": 0, "num_graph_launches": 0}, None),
        ({"compiled": True}, None, None),
        ({"compiled": False}, {"num_graph_launches": 2}, None),
    ],
)
def test_a_lower_bound_says_why(facts, trace, said):
    hidden = step_flops(flops_facts(**facts), trace, 512).hidden

    assert hidden is None if said is None else said in hidden


def test_the_share_is_flops_by_time_by_peak():
    found = utilization({"fp32": 5 * 10**9}, 10_000_000, DEVICE, None, "model")

    assert (found.share, found.flops_per_s) == (0.5, 5 * 10**11)
    assert "fp32 1 TFLOP/s" in found.limit and "dense peak of Imaginary 1" in found.limit
    assert found.source == "a sheet of paper, page 3"
    assert found.formula == "model FLOPs ÷ step time ÷ limit"


def test_several_dtypes_take_each_their_own_time_at_the_peak():
    found = utilization({"fp32": 10**9, "bf16": 16 * 10**9}, 10_000_000, DEVICE, None, "model")

    assert found.share == pytest.approx((0.001 + 0.004) / 0.01)
    assert found.limit.startswith("bf16 4 TFLOP/s, fp32 1 TFLOP/s")  # the larger part first


def test_a_measured_ceiling_stands_in_for_an_unknown_peak_and_says_so():
    found = utilization({"fp32": 5 * 10**9}, 10_000_000, None, CEILINGS, "model")

    assert found.share == 1.0
    assert "measured" in found.limit and "2026-01-01" in found.source


@pytest.mark.parametrize(
    ("flops", "step_ns", "device", "ceilings"),
    [
        ({"fp32": 1}, 1, None, None),
        ({"fp64": 1}, 1, DEVICE, None),
        ({"fp32": 1, "fp64": 1}, 1, DEVICE, None),
        ({}, 1, DEVICE, None),
        ({"fp32": 0}, 1, DEVICE, None),
        ({"fp32": 1}, 0, DEVICE, None),
        ({"bf16": 1}, 1, None, CEILINGS),
    ],
)
def test_without_a_limit_there_is_no_share(flops, step_ns, device, ceilings):
    assert utilization(flops, step_ns, device, ceilings, "model") is None
