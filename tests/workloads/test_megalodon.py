"""megalodon: exact parameter counts, variants equal, norms by definition, decoding, FLOPs, proofs."""

from __future__ import annotations

import pytest
import torch
from evidence import evidence_of
from torch.utils.flop_counter import FlopCounterMode
from variants import assert_same, built_of, losses_of, results_of

from parametrized import parametrized
from stepscope.errors import UsageError
from stepscope.workloads.models.megalodon import WORKLOAD, TimestepNorm, forward_flops

# Preset → exact count, and what its description says, in millions.
COUNTS = {
    "profile": (8_909_952, 8.91),
    "forward": (34_397_184, 34.4),
    "200m": (187_902_976, 187.9),
    "1.3b": (1_277_462_528, None),
    "tiny": (90_176, None),
}
SIZES = {"batch": 2, "seq_len": 80, "chunk": 32}
VARIANTS = [("fft", "builtin"), ("scan", "builtin"), ("sequential", "sdpa"), ("fft", "sdpa"), ("scan", "sdpa")]


@pytest.mark.parametrize("preset", WORKLOAD.presets)
def test_every_preset_has_its_exact_parameter_count(preset):
    config = WORKLOAD.configure(preset)
    with torch.device("meta"):
        module = WORKLOAD.build(config).module
    counted = sum(parameter.numel() for parameter in module.parameters())
    exact, millions = COUNTS[preset]

    assert counted == exact
    assert millions is None or round(exact / 1e6, 2 if millions < 10 else 1) == millions


def test_swiglu_has_three_matrices_and_no_biases():
    config = WORKLOAD.configure("tiny", ffn="swiglu")
    counted = sum(parameter.numel() for parameter in WORKLOAD.build(config).module.parameters())

    assert counted == 90_176 + 2 * (64 * 128 - 128 - 64)


def test_the_default_is_profile():
    config = WORKLOAD.configure()
    assert (config.width, config.layers, config.chunk, config.num_states) == (384, 6, 512, 8)


@parametrized("ffn", ["plain", "swiglu"], quick=1)
@pytest.mark.parametrize(("ema", "attention"), VARIANTS)
def test_variants_equal_the_reference(ema, attention, ffn):
    reference = built_of(WORKLOAD, ffn=ffn, **SIZES, **WORKLOAD.reference)
    state, batch = reference.module.state_dict(), reference.batch()
    truth = results_of(reference, {name: tensor.clone() for name, tensor in state.items()}, batch)
    values = {"ema": ema, "attention": attention, "ffn": ffn, **SIZES}

    assert_same(results_of(built_of(WORKLOAD, **values), state, batch), truth, 1e-10)
    # Norms over time pass each rounding of 6e-8 on to all later tokens: some hundred of them in a gradient.
    assert_same(results_of(built_of(WORKLOAD, **values), state, batch, torch.float32), truth, 1e-4)


def test_timestep_norm_is_that_of_all_tokens_so_far():
    torch.manual_seed(0)
    norm = TimestepNorm(6, 2).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 9, 6, dtype=torch.float64) * 3 + 5
    found, state = norm(x)

    for t in range(9):
        for group in (slice(0, 3), slice(3, 6)):
            so_far = x[:, : t + 1, group].flatten(1)
            mean, variance = so_far.mean(1, keepdim=True), so_far.var(1, keepdim=True, correction=0)
            wanted = (x[:, t, group] - mean) / (variance + 1e-5).sqrt()
            wanted = wanted * (norm.weight[group] + 1) + norm.bias[group]
            torch.testing.assert_close(found[:, t, group], wanted, rtol=1e-10, atol=1e-10)
    first, between = norm(x[:, :4])
    second, last = norm(x[:, 4:], 4, between)
    torch.testing.assert_close(torch.cat((first, second), dim=1), found, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, state, rtol=1e-12, atol=0)


def test_timestep_norm_survives_a_mean_far_above_the_spread():
    """E[x²] − E[x]² in float32 would be all rounding: 1e8 with a step of 8."""
    torch.manual_seed(0)
    norm, x = TimestepNorm(16, 1), torch.randn(1, 2000, 16) + 1e4
    exact = norm.double()(x.double())[0]

    torch.testing.assert_close(norm.float()(x)[0].double(), exact, rtol=0, atol=5e-3)


def test_the_second_residual_is_the_input_of_the_block():
    built = built_of(WORKLOAD, **SIZES)
    block = built.module.blocks[0]
    x = torch.randn(1, 8, 64)
    turn = built.module._turn(x, 0)
    attended = x + block.attention(x, turn, 0, None, False)[0]

    assert torch.equal(block(x, turn), x + block.ffn(attended))
    assert not torch.allclose(block(x, turn), attended + block.ffn(attended))


def test_no_token_sees_a_later_one_and_attention_sees_no_other_chunk():
    built = built_of(WORKLOAD, ema="sequential", **SIZES)
    tokens = built.batch()["tokens"]
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 256
    before, after = built.module(tokens=tokens), built.module(tokens=changed)

    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-6)
    assert (before[:, 40:] - after[:, 40:]).abs().max() > 1e-3
    attention = built.module.blocks[0].attention
    query, key, value = (torch.randn(1, 2, 80, 16, requires_grad=True) for _ in range(3))
    attention._attend(query, key, value)[:, :, 70].sum().backward()
    reached = key.grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist()

    assert reached == list(range(64, 71))


@pytest.mark.long
@pytest.mark.parametrize("ema", ["fft", "sequential", "scan"])
@pytest.mark.parametrize("attention", ["builtin", "sdpa"])
def test_decoding_one_token_at_a_time_equals_the_whole(ema, attention):
    built = built_of(WORKLOAD, ema=ema, attention=attention, **SIZES)
    module, tokens = built.module.double(), built.batch()["tokens"]
    whole, state, steps = module(tokens), None, []
    with torch.no_grad():
        for t in range(tokens.shape[1]):
            logits, state = module.decode(tokens[:, t : t + 1], state)
            steps.append(logits)

    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-10)
    assert state.num_tokens == 80
    assert state.blocks[0].key.shape[2] == 80 % 32


def test_decoding_in_pieces_that_cross_chunks_equals_the_whole():
    built = built_of(WORKLOAD, **SIZES)
    module, tokens = built.module.double(), built.batch()["tokens"]
    state, parts = None, []
    for part in tokens.split([5, 27, 1, 46, 1], dim=1):
        logits, state = module.decode(part, state)
        parts.append(logits)

    torch.testing.assert_close(torch.cat(parts, dim=1), module(tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("ema", ["fft", "sequential", "scan"])
def test_the_state_keeps_nothing_alive_but_itself(ema):
    """Views of the keys and sums of all tokens would be a state that grows with what was read."""
    built = built_of(WORKLOAD, ema=ema, **SIZES)
    with torch.no_grad():
        state = built.module.decode(built.batch()["tokens"])[1]
    for tensor in (*state.norm, *(part for block in state.blocks for part in (*block.norm, *block[1:]))):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("checkpoint", [1, 2])
def test_checkpointing_changes_no_number(checkpoint):
    plain = built_of(WORKLOAD, **SIZES)
    state, batch = plain.module.state_dict(), plain.batch()
    truth = results_of(plain, state, batch)

    assert_same(results_of(built_of(WORKLOAD, checkpoint=checkpoint, **SIZES), state, batch), truth, 1e-14)


@pytest.mark.parametrize("ffn", ["plain", "swiglu"])
def test_flops_by_formula_are_the_counted_ones_but_for_the_causal_half_and_the_recurrence(ffn):
    built = built_of(WORKLOAD, ffn=ffn, ema="sequential", attention="builtin", **SIZES)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built.module(**built.batch())
    # Written-out attention computes all scores of a chunk, the formula counts half; the loop has no matrix product.
    pairs = 2 * (32**2 + 32**2 + 16**2)
    causal_half = 2 * pairs * (32 + 64)
    recurrence = 2 * 160 * 64 * (4 * 14 + 2)

    assert built.forward_flops == counter.get_total_flops() - causal_half + recurrence


def test_flops_of_200m_are_near_two_a_parameter_and_token():
    config = WORKLOAD.configure("200m")
    share = forward_flops(config) / (2 * COUNTS["200m"][0] * config.batch * config.seq_len)
    # Attention adds chunk ÷ 2 · (Z + E) a token and layer: 28 M beside 188 M weights.
    assert share == pytest.approx(1 + 12 * 1024 * 2304 / 187.9e6, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("ema", ["fft", "sequential", "scan"])
@pytest.mark.parametrize("attention", ["builtin", "sdpa"])
def test_proofs_hold_for_what_ran_and_for_nothing_else(ema, attention):
    evidence = evidence_of(built_of(WORKLOAD, ema=ema, attention=attention, **SIZES))
    claims = [("fft", "builtin"), ("sequential", "sdpa"), ("scan", "sdpa")]
    proofs = [proof for e, a in claims for proof in built_of(WORKLOAD, ema=e, attention=a, **SIZES).proofs]
    shown = {proof.claim for proof in proofs if proof.shows(evidence)}

    assert shown == {f"ema={ema}", f"attention={attention}"}


@pytest.mark.long
@pytest.mark.parametrize("ema", ["fft", "scan"])
def test_tiny_learns_a_batch_by_heart(ema):
    built = built_of(WORKLOAD, ema=ema)
    losses = losses_of(built, torch.optim.AdamW(built.module.parameters(), lr=3e-3), 12)

    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so
@pytest.mark.parametrize("ema", ["fft", "scan"])
def test_bfloat16_weights_and_autocast_run(ema):
    built = built_of(WORKLOAD, ema=ema, **SIZES)
    batch = built.batch()
    wanted = built.module(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = built.module(**batch)
        assert loss.item() == pytest.approx(wanted.item(), rel=0.02)
    loss.backward()
    built.module.to(torch.bfloat16)

    assert built.module(**batch).item() == pytest.approx(wanted.item(), rel=0.05)
    built.module.decode(batch["tokens"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"z_width": 30}, "z_width=30 must be a multiple of 2 × heads=2"),
        ({"value_width": 63}, "value_width=63 must be a multiple of heads=2"),
        ({"groups": 7}, "width=64 must be a multiple of groups=7"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(values, words):
    with pytest.raises(UsageError, match=words):
        built_of(WORKLOAD, **values)
