"""The attention op: every implementation equal to the formula, forced back ends forced or an error, proofs."""

from __future__ import annotations

import pytest
import torch
from evidence import evidence_of
from torch.utils.flop_counter import FlopCounterMode
from variants import assert_same, built_of, results_of

from stepscope.workloads.ops.attention import PROOFS, WORKLOAD, causal_mask

ON_CPU = ("naive", "builtin", "custom", "flash", "math")
SQUARES = [("naive", 3), ("builtin", 1), ("custom", 1), ("flash", 0), ("math", 1)]
SMALL = {"batch": 2, "heads": 3, "seq_len": 40, "head_width": 16}


def test_the_default_is_the_benchmark_of_one_head_and_batch_8():
    config = WORKLOAD.configure()
    assert (config.batch, config.heads, config.head_width, config.causal) == (8, 1, 64, True)


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_is_softmax_attention(causal):
    built = built_of(WORKLOAD, causal=causal, **SMALL)
    batch = {name: tensor.detach().double() for name, tensor in built.batch().items()}
    found = built.module(**batch)
    query, key, value = batch["query"][1, 2], batch["key"][1, 2], batch["value"][1, 2]
    for row in (0, 7, 39):
        last = row + 1 if causal else 40
        weights = torch.exp(query[row] @ key[:last].T / 4)
        torch.testing.assert_close(found[1, 2, row], (weights / weights.sum()) @ value[:last])


def test_the_mask_lets_a_query_see_itself_and_what_came_before():
    assert causal_mask(3, torch.device("cpu")).tolist() == [[True, False, False], [True, True, False], [True] * 3]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", ON_CPU[1:])
def test_implementations_equal_the_reference(implementation, causal):
    reference = built_of(WORKLOAD, causal=causal, **SMALL)
    batch = reference.batch()
    truth = results_of(reference, {}, batch)
    values = {"implementation": implementation, "causal": causal, **SMALL}

    assert_same(results_of(built_of(WORKLOAD, **values), {}, batch), truth, 1e-12)
    assert_same(results_of(built_of(WORKLOAD, **values), {}, batch, torch.float32), truth, 1e-5)


@pytest.mark.parametrize("implementation", ["efficient", "cudnn"])
def test_a_back_end_that_cannot_run_says_so_and_what_torch_said(implementation):
    built = built_of(WORKLOAD, implementation=implementation, **SMALL)
    with pytest.raises(
        RuntimeError, match=f"'{implementation}' cannot run torch.float32, head width 16, on cpu: No "
    ):
        built.module(**built.batch())


def test_other_errors_pass_through_as_they_are():
    built = built_of(WORKLOAD, implementation="math", **SMALL)
    batch = built.batch()
    with pytest.raises(RuntimeError) as raised:
        built.module(batch["query"], batch["key"][..., :8], batch["value"])
    assert "cannot run" not in str(raised.value)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_proofs_hold_for_what_ran_and_for_nothing_else(implementation):
    evidence = evidence_of(built_of(WORKLOAD, implementation=implementation, **SMALL))

    assert [claim for claim, proof in PROOFS.items() if proof.shows(evidence) is not None] == [implementation]


@pytest.mark.parametrize("causal", [True, False])
def test_flops_by_formula_are_the_counted_ones_and_half_where_causal(causal):
    built = built_of(WORKLOAD, causal=causal, **SMALL)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built.module(**built.batch())

    assert built.forward_flops * (2 if causal else 1) == counter.get_total_flops() == 4 * 2 * 3 * 40 * 40 * 16


@pytest.mark.parametrize(("implementation", "squares"), SQUARES)
def test_square_tensors_kept_for_backward(implementation, squares):
    built = built_of(WORKLOAD, implementation=implementation, **SMALL)
    kept = {}

    def keep(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().nbytes() == 2 * 3 * 40 * 40 * 4:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        built.module(**built.batch())

    assert len(kept) == squares
