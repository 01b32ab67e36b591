"""nano: exact parameter counts, every variant equal under its mask, densities and FLOPs, proofs."""

from __future__ import annotations

import pytest
import torch
from evidence import evidence_of
from torch.utils.flop_counter import FlopCounterMode
from variants import assert_same, built_of, losses_of, results_of

from parametrized import parametrized
from stepscope.errors import UsageError
from stepscope.workloads.models.nano import WORKLOAD
from stepscope.workloads.sparse_patterns import causal_pairs, with_chosen
from stepscope.workloads.workload import Evidence

COUNTS = {"decoder_tiny": 50_904_064, "decoder_small": 151_862_784, "decoder_medium": 454_166_528, "tiny": 147_776}
SMALL = {"seq_len": 320, "window": 32, "global_tokens": 8, "random_keys": 16, "head_width": 8, "vocab": 64}
VARIANTS = [
    {"attention": "dense"},
    {"attention": "sparse_mask"},
    {"attention": "sparse_flex"},
    {"attention": "sparse_flex", "random": "scattered"},
    {"attention": "sparse_flex", "random": "scattered", "seq_len": 300, "kv_heads": 2},
    {"attention": "sparse_mask", "pattern": "dynamic"},
    {"attention": "sparse_flex", "pattern": "dynamic"},
    {"attention": "sparse_flex", "pattern": "dynamic", "seq_len": 300, "kv_heads": 1},
    {"attention": "dense", "kv_heads": 2},
    {"attention": "sparse_mask", "kv_heads": 2},
]
each_variant = parametrized("values", VARIANTS, quick=5, ids=lambda values: " ".join(map(str, values.values())))


@pytest.mark.parametrize("preset", WORKLOAD.presets)
def test_every_preset_has_its_exact_parameter_count(preset):
    config = WORKLOAD.configure(preset)
    with torch.device("meta"):
        module = WORKLOAD.build(config).module
    width, layers = config.heads * config.head_width, config.layers

    # Embedding, a layer of 4·D² attention and 12·D² SwiGLU with two norms, the last norm; the head is the embedding.
    by_formula = config.vocab * width + layers * (16 * width**2 + 2 * width) + width
    assert sum(parameter.numel() for parameter in module.parameters()) == by_formula == COUNTS[preset]


def test_presets_are_those_described():
    config = WORKLOAD.configure("decoder_medium")
    assert (config.layers, config.heads, config.width, config.seq_len) == (24, 16, 1024, 4096)
    assert (config.window, config.global_tokens, config.random_keys) == (1024, 128, 64)
    assert WORKLOAD.configure() == WORKLOAD.configure("decoder_tiny")


@pytest.mark.parametrize("attention", ["sparse_mask", "sparse_flex"])
@pytest.mark.parametrize("pattern", ["fixed", "dynamic"])
def test_variants_have_the_parameters_of_the_reference(attention, pattern):
    names = []
    for values in ({"attention": "dense"}, {"attention": attention}, {"attention": attention, "written_out": True}):
        state = built_of(WORKLOAD, pattern=pattern, **SMALL, **values).module.state_dict()
        names.append({name: tensor.shape for name, tensor in state.items()})

    assert names[0] == names[1] == names[2]
    assert ("blocks.0.attention.importance.weight" in names[0]) == (pattern == "dynamic")


@each_variant
def test_variants_equal_the_formula_under_the_same_mask(values):
    values = {**SMALL, **values}
    reference = built_of(WORKLOAD, **values, **WORKLOAD.reference)
    state = {name: tensor.clone() for name, tensor in reference.module.state_dict().items()}
    batch = reference.batch()
    truth = results_of(reference, state, batch)

    assert_same(results_of(built_of(WORKLOAD, **values), state, batch), truth, 1e-12)
    # Some hundred roundings of 6e-8 on the way to a gradient.
    assert_same(results_of(built_of(WORKLOAD, **values), state, batch, torch.float32), truth, 3e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "random", "kv_heads"),
    [("fixed", "blocks", 0), ("fixed", "scattered", 2), ("dynamic", "blocks", 2), ("dynamic", "scattered", 0)],
)
def test_flex_attention_itself_equals_the_formula(pattern, random, kv_heads):
    """Without gradients torch's FlexAttention runs on a CPU too: all scores, under the rule that a GPU gets."""
    values = {**SMALL, "pattern": pattern, "random": random, "kv_heads": kv_heads, "part": "attention"}
    flex = built_of(WORKLOAD, attention="sparse_flex", **values)
    right = built_of(WORKLOAD, attention="sparse_flex", written_out=True, **values)
    batch = {name: tensor.detach().double() for name, tensor in flex.batch().items()}

    torch.testing.assert_close(flex.module(**batch), right.module(**batch), rtol=1e-12, atol=1e-12)
    assert flex.facts()["density"] == right.facts()["density"]


def test_without_a_graph_flex_attention_runs_also_on_leaves_that_want_gradients(monkeypatch):
    flex = built_of(WORKLOAD, attention="sparse_flex", part="attention", **SMALL)
    batch = flex.batch()
    assert batch["query"].requires_grad
    called = []
    real = flex.module.flex_attention
    monkeypatch.setattr(flex.module, "flex_attention", lambda *a, **k: called.append(1) or real(*a, **k))

    with torch.inference_mode():
        flex.module(**batch)
    assert called == [1]
    flex.module(**batch).sum().backward()  # by the mask: FlexAttention has no backward on a CPU
    assert called == [1] and batch["query"].grad is not None


def test_one_compilation_serves_every_layer():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    built = built_of(WORKLOAD, attention="sparse_flex", pattern="dynamic", layers=9, **SMALL)
    counters.clear()
    with torch.no_grad():
        built.module(**built.batch())
        built.module(**built.batch())

    assert counters["stats"]["unique_graphs"] == 1


@parametrized("values", [{"attention": "sparse_mask"}, {"attention": "sparse_flex", "pattern": "dynamic"}], quick=1)
def test_no_query_sees_a_later_token(values):
    """Through attention; what is chosen is chosen over the whole sequence, so the scores are held."""
    built = built_of(WORKLOAD, part="attention", **SMALL, **values)
    batch = {name: tensor.detach().double() for name, tensor in built.batch().items()}
    before = built.module(**batch)
    for name in ("key", "value"):
        batch[name] = torch.cat((batch[name][:, :, :200], torch.zeros_like(batch[name][:, :, 200:])), dim=2)
    after = built.module(**batch)

    torch.testing.assert_close(before[:, :, :200], after[:, :, :200], rtol=1e-12, atol=1e-12)
    assert (before[:, :, 200:] - after[:, :, 200:]).abs().amax(dim=(0, 1, 3)).min() > 0


def test_sparse_is_not_dense_and_a_window_of_everything_is():
    dense = built_of(WORKLOAD, **SMALL)
    state, tokens = dense.module.state_dict(), dense.batch()["tokens"]
    wide, narrow = (
        built_of(WORKLOAD, attention="sparse_mask", **{**SMALL, "window": window}).module for window in (640, 32)
    )
    wide.load_state_dict(state)
    narrow.load_state_dict(state)

    torch.testing.assert_close(wide(tokens=tokens), dense.module(tokens=tokens))
    assert (narrow(tokens=tokens) - dense.module(tokens=tokens)).abs().max() > 1e-4


def test_importance_learns_and_decides():
    built = built_of(WORKLOAD, attention="sparse_flex", pattern="dynamic", **SMALL)
    built.module(**built.batch()).backward()
    gradient = built.module.blocks[0].attention.importance.weight.grad
    assert gradient.abs().max() > 0

    core = built_of(WORKLOAD, attention="sparse_mask", pattern="dynamic", part="attention", **SMALL)
    batch = core.batch()
    core.module(**batch)
    wanted = batch["importance"].topk(8).indices
    assert torch.equal(core.module.chosen, wanted)


def test_facts_are_those_of_the_mask():
    for attention in ("dense", "sparse_mask", "sparse_flex"):
        built = built_of(WORKLOAD, attention=attention, **SMALL)
        facts = built.facts()
        config = built.module.config
        if attention == "dense":
            pairs, executed = causal_pairs(320), 6 * 128 * 128
        else:
            written_out = built_of(WORKLOAD, attention=attention, written_out=True, **SMALL)
            pairs, executed = int(written_out.module.cores()[0].mask.sum()), 320**2
        assert facts["density"] == pytest.approx(pairs / 320**2)
        assert facts["causal_density"] == pytest.approx(pairs / causal_pairs(320))
        assert facts["sparsity"] == pytest.approx(1 - pairs / 320**2)
        assert facts["attention_formula_flops"] == pytest.approx(4 * pairs * config.width * 2 * 2)
        # On a CPU nothing is skipped, whatever the block mask says.
        assert facts["attention_executed_flops"] == pytest.approx(4 * executed * config.width * 2 * 2)


def test_dynamic_facts_count_the_last_pass():
    built = built_of(WORKLOAD, attention="sparse_mask", pattern="dynamic", **SMALL)
    built.module(**built.batch())
    masks = [with_chosen(core.mask, core.chosen) for core in built.module.cores()]
    pairs = sum(float(mask.sum()) for mask in masks) / 2 / 2
    assert built.facts()["density"] == pytest.approx(pairs / 320**2)


@pytest.mark.parametrize("values", [{}, {"kv_heads": 2}, {"attention": "sparse_mask"}])
def test_flops_by_formula_are_the_counted_ones_but_for_attention(values):
    """The counter sees written-out attention, which computes every pair; the formula counts the pairs asked for."""
    built = built_of(WORKLOAD, written_out=True, **SMALL, **values)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built.module(**built.batch())
    pairs = 320**2 / 2 if not values.get("attention") else built.facts()["density"] * 320**2
    unneeded = 2 * 2 * 4 * (320**2 - pairs) * 32

    assert built.forward_flops == pytest.approx(counter.get_total_flops() - unneeded, rel=1e-12)


def test_attention_alone_counts_one_layer():
    config = WORKLOAD.configure("decoder_medium", part="attention", seq_len=8192)
    with torch.device("meta"):
        built = WORKLOAD.build(config)
    assert built.forward_flops == 2 * 8192**2 * 1024
    assert not list(built.module.parameters())


@pytest.mark.parametrize("attention", ["dense", "sparse_mask", "sparse_flex"])
def test_proofs_hold_for_what_ran_and_for_nothing_else(attention):
    evidence = evidence_of(built_of(WORKLOAD, attention=attention, **SMALL), backward=attention != "sparse_flex")
    shown = [
        claimed
        for claimed in ("dense", "sparse_mask", "sparse_flex")
        if built_of(WORKLOAD, attention=claimed, **SMALL).proofs[0].shows(evidence)
    ]

    # No kernel skips a block on a CPU: there sparse_flex is unproven.
    assert shown == ([] if attention == "sparse_flex" else [attention])


def test_flex_is_proven_by_its_kernels():
    kernels = {"triton_tem_fused_flex_attention_0": 24, "triton_tem_fused_flex_attention_backward_1": 24}
    evidence = Evidence(device="cuda", ops={}, kernels=kernels, facts={})

    assert (
        built_of(WORKLOAD, attention="sparse_flex", **SMALL).proofs[0].shows(evidence) == "flex_attention kernels ×48"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("attention", "pattern"), [("sparse_mask", "dynamic"), ("sparse_flex", "fixed"), ("sparse_flex", "dynamic")]
)
def test_compiling_the_whole_changes_nothing(attention, pattern):
    built = built_of(WORKLOAD, attention=attention, pattern=pattern, layers=1, **SMALL)
    tokens = built.batch()["tokens"]
    with torch.no_grad():
        eager = built.module(tokens=tokens)
        torch._dynamo.reset()
        compiled = torch.compile(built.module, backend="aot_eager")(tokens=tokens)

    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def test_checkpointing_changes_no_number_where_tokens_are_chosen():
    values = {**SMALL, "attention": "sparse_mask", "pattern": "dynamic"}
    plain = built_of(WORKLOAD, **values)
    state, batch = plain.module.state_dict(), plain.batch()

    truth = results_of(plain, state, batch)
    assert_same(results_of(built_of(WORKLOAD, checkpoint=1, **values), state, batch), truth, 1e-14)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so
@parametrized("values", [{"attention": "sparse_mask"}, {"attention": "sparse_flex", "pattern": "dynamic"}], quick=1)
def test_bfloat16_weights_and_autocast_run(values):
    built = built_of(WORKLOAD, layers=1, batch=1, **{**SMALL, "seq_len": 144}, **values)
    batch = built.batch()
    with torch.no_grad():
        wanted = built.module(**batch).item()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert built.module(**batch).item() == pytest.approx(wanted, rel=0.02)
        built.module.to(torch.bfloat16)
        assert built.module(**batch).item() == pytest.approx(wanted, rel=0.05)


def test_tiny_learns_a_batch_by_heart():
    built = built_of(
        WORKLOAD, attention="sparse_flex", pattern="dynamic", **{**SMALL, "head_width": 16, "vocab": 256}
    )
    losses = losses_of(built, torch.optim.AdamW(built.module.parameters(), lr=3e-3), 10)

    assert losses[-1] < 0.9 * losses[0]


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="heads=4 must be a multiple of kv_heads=3"):
        built_of(WORKLOAD, kv_heads=3)
    with pytest.raises(UsageError, match="global_tokens ≥ 1"):
        built_of(WORKLOAD, pattern="dynamic", global_tokens=0)
