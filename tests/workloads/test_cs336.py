"""cs336: exact parameter counts, variants equal, what attention keeps for backward, FLOPs, proofs."""

from __future__ import annotations

import pytest
import torch
from evidence import evidence_of
from torch.utils.flop_counter import FlopCounterMode
from variants import assert_same, built_of, losses_of, results_of

from parametrized import parametrized
from stepscope.errors import UsageError
from stepscope.workloads.models.cs336 import WORKLOAD, forward_flops
from stepscope.workloads.optimizers import make_optimizer

# Preset → exact count, and what its description says, in millions.
COUNTS = {
    "small": (128_625_408, 128.6),
    "medium": (423_183_360, 423),
    "large": (969_411_840, 969),
    "xl": (1_998_235_200, 1998),
    "2.7B": (3_406_809_600, 3410),
    "10B": (12_832_823_808, None),
    "tiny": (115_008, None),
}
VARIANTS = [("builtin", "einsum"), ("sdpa", "einsum"), ("naive", "linear"), ("sdpa", "linear")]
SIZES = {"batch": 2, "seq_len": 24}


@parametrized("preset", WORKLOAD.presets, quick=4)
def test_every_preset_has_its_exact_parameter_count(preset):
    config = WORKLOAD.configure(preset)
    with torch.device("meta"):
        module = WORKLOAD.build(config).module
    counted = sum(parameter.numel() for parameter in module.parameters())
    exact, millions = COUNTS[preset]

    assert counted == exact
    assert millions is None or exact / 1e6 == pytest.approx(millions, rel=1e-3)


def test_the_default_is_small_at_128_tokens_and_batch_4():
    config = WORKLOAD.configure()
    assert (config.d_model, config.layers, config.seq_len, config.batch, config.rope) == (768, 12, 128, 4, False)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(("attention", "linear"), VARIANTS)
def test_variants_equal_the_reference(attention, linear, rope):
    reference = built_of(WORKLOAD, rope=rope, **SIZES, **WORKLOAD.reference)
    state = {name: tensor.clone() for name, tensor in reference.module.state_dict().items()}
    batch = reference.batch()
    truth = results_of(reference, state, batch)
    values = {"attention": attention, "linear": linear, "rope": rope, **SIZES}

    assert_same(results_of(built_of(WORKLOAD, **values), state, batch), truth, 1e-12)
    # A few hundred roundings of 6e-8 each on the way to a gradient.
    assert_same(results_of(built_of(WORKLOAD, **values), state, batch, torch.float32), truth, 2e-5)


def test_rope_matters_and_its_absence_leaves_no_position():
    outputs = [
        built.module(**{"tokens": torch.ones(1, 6, dtype=torch.long)})
        for built in (built_of(WORKLOAD, rope=False), built_of(WORKLOAD, rope=True))
    ]
    # Equal tokens: without positions every place sees the same.
    torch.testing.assert_close(outputs[0][0, 0], outputs[0][0, 5])
    one_after_another = torch.arange(6)[None]
    differ = [built_of(WORKLOAD, rope=rope).module(tokens=one_after_another) for rope in (False, True)]
    assert (differ[0] - differ[1]).abs().max() > 1e-3


def test_no_token_sees_a_later_one():
    built = built_of(WORKLOAD, **SIZES)
    tokens = built.batch()["tokens"]
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 256
    before, after = built.module(tokens=tokens), built.module(tokens=changed)

    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize(("attention", "per_layer"), [("naive", 3), ("builtin", 1), ("sdpa", 0)])
def test_square_tensors_kept_for_backward(attention, per_layer):
    """Naive keeps masked scores, exponentials and weights; torch.softmax only the weights; fused attention none."""
    built = built_of(WORKLOAD, attention=attention, batch=2, seq_len=48, layers=2)
    square = 2 * 4 * 48 * 48
    kept = {}

    def keep(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().nbytes() == square * 4:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    batch = built.batch()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = built.module(**batch)
    loss.backward()

    assert len(kept) == per_layer * 2


@pytest.mark.parametrize("checkpoint", [1, 2])
def test_checkpointing_changes_no_number(checkpoint):
    plain = built_of(WORKLOAD, **SIZES)
    state, batch = plain.module.state_dict(), plain.batch()
    truth = results_of(plain, state, batch)

    assert_same(results_of(built_of(WORKLOAD, checkpoint=checkpoint, **SIZES), state, batch), truth, 1e-14)


@pytest.mark.parametrize("linear", ["einsum", "linear"])
def test_flops_by_formula_are_the_counted_ones_but_for_the_causal_half(linear):
    built = built_of(WORKLOAD, linear=linear, **SIZES)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built.module(**built.batch())
    # Written-out attention computes all of seq_len² scores: 4·seq_len²·d a layer; the formula counts half.
    computed_for_nothing = 2 * 2 * 2 * 24**2 * 64

    assert built.forward_flops == counter.get_total_flops() - computed_for_nothing
    assert built.forward_flops == 2 * 48 * (2 * (4 * 64**2 + 3 * 64 * 128) + 256 * 64) + 2 * 2 * 2 * 24**2 * 64


def test_flops_of_small_by_hand():
    config = WORKLOAD.configure("small")
    weights = 12 * (4 * 768 * 768 + 3 * 768 * 3072) + 10_000 * 768
    assert forward_flops(config) == 2 * 512 * weights + 12 * 4 * 2 * 128 * 128 * 768


@pytest.mark.parametrize("attention", ["naive", "builtin", "sdpa"])
def test_proofs_hold_for_what_ran_and_for_nothing_else(attention):
    evidence = evidence_of(built_of(WORKLOAD, attention=attention, **SIZES))
    shown = {
        claimed: built_of(WORKLOAD, attention=claimed).proofs[0].shows(evidence)
        for claimed in ("naive", "builtin", "sdpa")
    }

    assert [claimed for claimed, words in shown.items() if words] == [attention]
    assert "×" in shown[attention]


@pytest.mark.parametrize("optimizer", ["adamw", "handwritten"])
def test_tiny_learns_a_batch_by_heart(optimizer):
    built = built_of(WORKLOAD, attention="sdpa", linear="linear", **SIZES)
    losses = losses_of(built, make_optimizer(optimizer, built.module.parameters()), 12)

    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_bfloat16_weights_and_autocast_run(attention):
    built = built_of(WORKLOAD, attention=attention, rope=True, **SIZES)
    batch = built.batch()
    wanted = built.module(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert built.module(**batch).item() == pytest.approx(wanted.item(), rel=0.02)
    built.module.to(torch.bfloat16)

    assert built.module(**batch).item() == pytest.approx(wanted.item(), rel=0.05)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(UsageError, match="d_model=64 must be a multiple of heads=5"):
        built_of(WORKLOAD, heads=5)
