"""tsmoe: exact parameter counts, its loss by hand, dispatch variants alike in the whole model."""

from __future__ import annotations

import pytest
import torch
from evidence import evidence_of
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stepscope.errors import UsageError
from stepscope.workloads.models import tsmoe
from stepscope.workloads.models.tsmoe import HORIZONS, WORKLOAD, huber


def built_of(**values):
    torch.manual_seed(0)
    return WORKLOAD.build(WORKLOAD.configure("tiny", **values))


def batch_of(built, dtype=torch.float64):
    torch.manual_seed(1)
    return {name: tensor.to(dtype) for name, tensor in built.batch().items()}


def results(built, batch, dtype=torch.float64):
    module = built.module.to(dtype)
    module.zero_grad()
    loss = module(**batch)
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    outputs = {f"horizon {h}": y for h, y in zip(HORIZONS, module(batch["series"]))}
    return {"loss": loss, **outputs, **gradients}


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [("538m", 538_130_793, 198_392_169), ("23m", 23_108_841, 12_492_009), ("tiny", 122_921, 90_153)],
)
def test_parameters_are_counted_exactly(preset, total, active):
    with torch.device("meta"):
        built = WORKLOAD.build(WORKLOAD.configure(preset))

    assert sum(p.numel() for p in built.module.parameters()) == total
    assert built.num_active_parameters == active


def test_the_default_is_538m_at_16_times_4096():
    config = WORKLOAD.configure()

    assert next(iter(WORKLOAD.presets)) == "538m"
    assert (config.batch, config.seq_len, config.checkpoint) == (16, 4096, 0)
    (dispatch,) = (knob for knob in WORKLOAD.knobs() if knob.name == "dispatch")
    assert dispatch.values == ("loop", "capacity", "one_hot", "tile", "grouped", "indexed")


@pytest.mark.parametrize("dispatch", ["capacity", "one_hot", "tile", "grouped", "indexed"])
@pytest.mark.parametrize("routing", ["learned", "balanced"])
def test_every_dispatch_is_the_loop_where_none_is_dropped(dispatch, routing):
    values = {"routing": routing, "capacity_factor": 2.0, "seq_len": 50}
    plain, other = built_of(**values), built_of(dispatch=dispatch, **values)
    other.module.load_state_dict(plain.module.state_dict())
    batch = batch_of(plain)

    wanted, found = results(plain, batch), results(other, batch)

    assert other.facts()["dropped_slots"] == 0
    for name, right in wanted.items():
        torch.testing.assert_close(found[name], right, rtol=1e-10, atol=1e-12, msg=name)


def test_a_given_mask_is_the_causal_one_and_an_inverted_one_is_not():
    plain, given, inverted = (built_of(mask=mask) for mask in ("causal", "given", "inverted"))
    batch = batch_of(plain)

    wanted, found = results(plain, batch), results(given, batch)

    for name, right in wanted.items():
        torch.testing.assert_close(found[name], right, rtol=1e-10, atol=1e-12, msg=name)
    assert not torch.allclose(inverted.module.double()(batch["series"])[0], wanted["horizon 1"], rtol=0.01)


def test_a_mask_is_proven_where_it_was_given():
    claims = {mask: built_of(mask=mask).proofs for mask in ("causal", "given")}
    evidence = {mask: evidence_of(built_of(mask=mask)) for mask in claims}

    (proof,) = [proof for proof in claims["given"] if proof.claim == "mask=given"]
    assert len(claims["causal"]) == 1
    assert proof.shows(evidence["given"]) and proof.shows(evidence["causal"]) is None


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_changes_nothing(every):
    plain, other = built_of(), built_of(checkpoint=every)
    batch = batch_of(plain)

    wanted, found = results(plain, batch), results(other, batch)

    for name, right in wanted.items():
        torch.testing.assert_close(found[name], right, rtol=1e-12, atol=1e-14, msg=name)


def test_huber_leaves_out_what_runs_past_the_end():
    torch.manual_seed(0)
    forecast, targets = torch.randn(2, 5, 3).double() * 4, torch.randn(2, 5).double()
    losses = [
        functional.huber_loss(forecast[b, t, j], targets[b, t + j], delta=2.0)
        for b in range(2)
        for t in range(5)
        for j in range(3)
        if t + j < 5
    ]

    assert len(losses) == 24
    torch.testing.assert_close(huber(forecast, targets), torch.stack(losses).mean())


def test_the_loss_is_the_mean_over_horizons_and_the_balance():
    built = built_of(layers=2)
    batch = batch_of(built)
    module = built.module.double()
    seen = []
    for block in module.blocks:
        block.moe.register_forward_hook(lambda _, __, out: seen.append(out[1]))

    loss = module(**batch)
    forecasts = module(batch["series"])

    assert [y.shape[-1] for y in forecasts] == [1, 8, 32, 64]
    wanted = sum(huber(y, batch["targets"]) for y in forecasts) / 4 + 0.02 * (seen[0] + seen[1]) / 2
    torch.testing.assert_close(loss, wanted)


def by_hand(module, series):
    """The forecasts by the formulas of the model, term by term; the experts' layer has its own test."""

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def turned(x):
        half = x.shape[-1] // 2
        rates = 10_000.0 ** -(torch.arange(half).double() / half)
        pairs = torch.complex(x[..., :half], x[..., half:])
        pairs = pairs * torch.exp(1j * torch.arange(x.shape[-2])[:, None] * rates)
        return torch.cat((pairs.real, pairs.imag), -1)

    points = series[..., None]
    gate, value = points @ module.embed_gate.weight.T, points @ module.embed_value.weight.T
    x = gate * torch.sigmoid(gate) * value
    later = torch.ones(series.shape[1], series.shape[1]).triu(1).bool()
    for block in module.blocks:
        n = norm(x, block.norm1.weight)
        qkv = n @ block.attention.qkv.weight.T + block.attention.qkv.bias
        heads = [part.unflatten(-1, (block.attention.num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)]
        scores = turned(heads[0]) @ turned(heads[1]).mT / heads[0].shape[-1] ** 0.5
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ heads[2]
        h = norm(attended.transpose(1, 2).flatten(2) @ block.attention.out.weight.T + n, block.norm2.weight)
        x = h + block.moe(h)[0]
    return [x @ head.weight.T + head.bias for head in module.heads]


def test_the_model_is_its_formulas():
    built = built_of(seq_len=20)
    series = batch_of(built)["series"] * 3
    module = built.module.double()

    for found, wanted in zip(module(series), by_hand(module, series)):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_target_is_the_point_after_and_positions_see_no_later_ones():
    built = built_of()
    batch = batch_of(built)
    assert torch.equal(batch["series"][:, 1:], batch["targets"][:, :-1])

    module = built.module.double()
    before = module(batch["series"])
    batch["series"][:, 60:] += 1.0
    after = module(batch["series"])

    for left, right in zip(before, after):
        torch.testing.assert_close(left[:, :60], right[:, :60])
        assert not torch.equal(left[:, 60:], right[:, 60:])


def test_it_learns():
    built = built_of(seq_len=64, routing="balanced", dispatch="grouped")
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=3e-3)
    torch.manual_seed(3)
    batch = built.batch()
    losses = []
    for _ in range(30):
        loss = built.module(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    assert losses[-1] < 0.7 * losses[0]


def test_the_formula_is_the_counter_but_for_the_masked_half_of_attention():
    config = WORKLOAD.configure("tiny")
    built = WORKLOAD.build(config)
    batch = built.batch()
    # The counter does not know the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        built.module(batch["series"])

    # It takes attention as if nothing were masked: 2 · 2 · S² · d a layer and series, of which we count half.
    masked = config.layers * config.batch * 2 * config.seq_len**2 * config.d_model
    assert built.forward_flops == counter.get_total_flops() - masked
    assert tsmoe.forward_flops(config) == built.forward_flops


def test_facts_and_proof_of_the_loop():
    built = built_of()
    evidence = evidence_of(built)

    (proof,) = built.proofs
    assert proof.claim == "dispatch=loop" and "aten::mm" in proof.shows(evidence)
    assert set(evidence.facts) >= {"dropped_slots", "load_max_over_mean", "dropped_share", "padded_share"}
    assert built_of(dispatch="capacity").proofs[0].shows(evidence) is None


def test_heads_of_an_odd_width_are_refused():
    with pytest.raises(UsageError, match="d_model=64"):
        built_of(heads=64)
