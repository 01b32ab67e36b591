"""hydra: sizes, attention by hand, routes by hand, variants that agree, and proof of what ran."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest

from parametrized import parametrized

torch = pytest.importorskip("torch")
from evidence import evidence_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stepscope.errors import UsageError
from stepscope.workloads.models.hydra import CCGQA, WORKLOAD, CausalConvs, build
from stepscope.workloads.models.layers import rope, rope_tables

SMALL = {**WORKLOAD.gate, "seq_len": 16}
no_bf16_units = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

PARAMETERS = {
    "100m": 85_125_136,
    "tiny": 178_854,
    "debug": 30_906_372,
    "50m": 46_440_464,
    "250m": 146_898_964,
    "500m": 491_104_796,
    "1b": 662_981_672,
    "1.5b": 934_860_844,
}


def made(dtype=torch.float64, seed=0, **knobs):
    """A small hydra whose routers spread the tokens over every depth, and a batch."""
    torch.manual_seed(seed)
    built = build(WORKLOAD.configure("tiny", **{**SMALL, **knobs}))
    for name, parameter in built.module.named_parameters():
        if "router.weight" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return dataclasses.replace(built, module=built.module.to(dtype)), built.batch()


def results(built, batch):
    """Outputs, loss, and the gradient of every parameter (zeros where there is none)."""
    module = built.module
    module.zero_grad(set_to_none=True)
    loss = module(**batch)
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
    with torch.no_grad():
        return {"outputs": module(batch["tokens"]), "loss": loss.detach(), **gradients}


def assert_equal(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("preset", WORKLOAD.presets)
def test_parameters_of_every_preset(preset):
    config = WORKLOAD.configure(preset)
    with torch.device("meta"):
        module = build(config).module

    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[preset]


def test_variants_have_the_same_parameters():
    plain, _ = made()
    shapes = {name: tensor.shape for name, tensor in plain.module.state_dict().items()}
    for knobs in (
        {"routing": "dynamic"},
        {"capacity": 0.5},
        {"loss": "fused"},
        {"gqa": "repeated"},
        {"checkpoint": 1},
    ):
        other, _ = made(**knobs)
        assert {name: tensor.shape for name, tensor in other.module.state_dict().items()} == shapes


def test_routers_of_capacity_are_in_all_blocks_but_the_outer_two():
    built, _ = made(blocks=5)
    assert [block.capacity_router is not None for block in built.module.blocks] == [False, True, True, True, False]


# Attention, one number at a time.


def conv_by_hand(x, weight, groups):
    """y[t, o] = Σ w[o, c, j] · x[t − 2 + j, c] over taps j and channels c of o's group; nothing before the first."""
    length, channels = x.shape
    size = channels // groups
    y = torch.zeros_like(x)
    for t in range(length):
        for o in range(channels):
            first = o // size * size
            for j in range(3):
                if t - 2 + j >= 0:
                    y[t, o] += weight[o, :, j] @ x[t - 2 + j, first : first + size]
    return y


def ccgqa_by_hand(attention, x):
    """CCGQA of one sequence x [length, dim], straight from the description."""
    heads, kv_heads, width = attention.heads, attention.kv_heads, attention.head_width
    latent, kv, length = heads * width, kv_heads * width, len(x)
    projected = x @ attention.qkv.weight.t()
    q0, k0, v0 = projected[:, :latent], projected[:, latent : latent + kv], projected[:, latent + kv :]
    v = v0.clone()
    v[0, kv // 2 :] = 0
    for t in range(1, length):
        v[t, kv // 2 :] = v0[t - 1, kv // 2 :]
    convs = attention.q_convs
    q = conv_by_hand(conv_by_hand(q0, convs.within_heads.weight, heads), convs.across_heads.weight, 1)
    convs = attention.k_convs
    k = conv_by_hand(conv_by_hand(k0, convs.within_heads.weight, kv_heads), convs.across_heads.weight, 1)
    mean_k = sum(k0[:, i * width : (i + 1) * width] for i in range(kv_heads)) / kv_heads
    mean_q = sum(q0[:, i * width : (i + 1) * width] for i in range(heads)) / heads
    cos, sin = rope_tables(length, width, x)
    out = torch.zeros(length, latent, dtype=x.dtype)
    for head in range(heads):
        group = head // (heads // kv_heads)
        here, there = slice(head * width, (head + 1) * width), slice(group * width, (group + 1) * width)
        query, key = q[:, here] + mean_k / 2, k[:, there] + mean_q / 2
        query, key = query / query.norm(dim=1, keepdim=True), key / key.norm(dim=1, keepdim=True)
        scores = rope(query, cos, sin) @ rope(key * attention.temperature, cos, sin).t()
        for t in range(length):
            p = scores[t, : t + 1].exp()
            out[t, here] = (p / p.sum()) @ v[: t + 1, there]
    return out @ attention.out.weight.t()


@pytest.mark.parametrize("gqa", ["native", "repeated"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 3), (3, 1)])
@torch.no_grad()
def test_attention_is_the_description(gqa, heads, kv_heads):
    torch.manual_seed(1)
    dim = 4 * heads * 4
    attention = CCGQA(dim, heads, kv_heads, gqa).double()
    attention.temperature.fill_(1.7)
    x = torch.randn(2, 7, dim, dtype=torch.float64)
    found = attention(x, *rope_tables(7, 4, x))

    for sequence in range(2):
        torch.testing.assert_close(found[sequence], ccgqa_by_hand(attention, x[sequence]), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_no_token_sees_the_future():
    for knobs in ({}, {"routing": "dynamic"}):
        built, batch = made(**knobs)
        tokens = batch["tokens"]
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % 256
        before, after = built.module(tokens), built.module(changed)

        torch.testing.assert_close(after[:, :9], before[:, :9], rtol=1e-12, atol=1e-12)
        assert (after[:, 9:] != before[:, 9:]).any(dim=-1).all()


# Routes.


def block_by_hand(block, x, cos, sin, routing, capacity):
    """A block, each token on its own: what it runs is computed, what it does not run is not there."""
    batch, length, _ = x.shape
    recursions = block.recursions
    h = x + 0.5 * block.attention(block.attention_norm(x), cos, sin)
    out = torch.zeros_like(h)
    for b in range(batch):
        chosen = range(length)
        if block.capacity_router is not None and capacity < 1:
            scores = block.capacity_router(h[b]).squeeze(-1).tolist()
            chosen = sorted(range(length), key=lambda t, s=scores: -s[t])[: round(capacity * length)]
        for t in range(length):
            token = h[b, t]
            depth = (recursions - 1) * torch.sigmoid(
                token @ block.depth_router.weight[0] + block.depth_router.bias[0]
            )
            for r in range(recursions if t in chosen else 0):
                if routing == "static" or r <= float(depth) + 0.5:
                    weight = torch.exp(-((r - depth) ** 2) / (2 * (recursions / 2) ** 2))
                    where = block.recursion_bias[r] + block.recursion_embedding[r]
                    token = token + weight * block.mlp(block.mlp_norm(token + where))
            out[b, t] = token
    return block.final_norm(out)


@pytest.mark.parametrize("dispatch", ["gather", "mask"])
@parametrized("capacity", [1.0, 0.5, 0.06], quick=2)
@pytest.mark.parametrize("routing", ["static", "dynamic"])
@torch.no_grad()
def test_a_token_runs_what_its_route_says(routing, capacity, dispatch):
    built, batch = made(routing=routing, capacity=capacity, dispatch=dispatch)
    module = built.module
    x = module.embedding(batch["tokens"]) * 8.0
    tables = rope_tables(16, 4, x)
    depths = set()
    for block in module.blocks:
        depths |= set(block.route(x)[1].unique().tolist())
        expected = block_by_hand(block, x, *tables, routing, capacity)
        torch.testing.assert_close(block(x, *tables), expected, rtol=1e-10, atol=1e-10)
        x = expected
    # The case is worth its name: dynamic tokens of every depth, and tokens that capacity turned away.
    assert depths == ({3} if routing == "static" else {1, 2, 3}) | ({0} if capacity < 1 else set())


@parametrized("capacity", [1.0, 0.75, 0.25], quick=2)
@pytest.mark.parametrize("routing", ["static", "dynamic"])
@pytest.mark.parametrize("seed", [0, 1])
def test_gathering_equals_masking(routing, capacity, seed):
    gathered = results(*made(routing=routing, capacity=capacity, seed=seed))
    masked = results(*made(routing=routing, capacity=capacity, seed=seed, dispatch="mask"))

    assert_equal(gathered, masked)
    assert gathered["blocks.1.depth_router.weight"].abs().max() > 0
    assert (gathered["blocks.1.capacity_router.weight"].abs().max() > 0) == (capacity < 1)


def set_depth(built, bias):
    for block in built.module.blocks:
        torch.nn.init.zeros_(block.depth_router.weight)
        torch.nn.init.constant_(block.depth_router.bias, bias)


@pytest.mark.parametrize("capacity", [1.0, 0.5])
def test_dynamic_is_static_where_every_token_goes_on(capacity):
    found = {}
    for routing in ("static", "dynamic"):
        built, batch = made(routing=routing, capacity=capacity)
        set_depth(built, 3.0)  # δ = 2 · 0.953, nearer 2 than 1: all three recursions
        found[routing] = results(built, batch)
        if capacity == 1.0:
            assert built.facts() == {"executed_fraction": 1.0}

    assert_equal(found["dynamic"], found["static"])


def test_dynamic_is_not_static_where_tokens_stop():
    static, dynamic = results(*made()), results(*made(routing="dynamic"))
    assert (static["outputs"] - dynamic["outputs"]).abs().max() > 1e-4


def test_all_tokens_may_stop_at_once():
    built, batch = made(routing="dynamic")
    set_depth(built, -3.0)
    expected, _ = made(routing="dynamic", dispatch="mask")
    set_depth(expected, -3.0)

    assert_equal(results(built, batch), results(expected, batch))
    assert built.facts()["executed_fraction"] == pytest.approx(1 / 3, abs=1e-15)


def test_full_capacity_is_dense():
    full = results(*made(capacity=1.0))
    dense, batch = made()
    for block in dense.module.blocks:
        block.capacity_router = None
    expected = results(dense, batch)

    assert full.pop("blocks.1.capacity_router.weight").abs().max() == 0
    assert_equal(full, expected)


@torch.no_grad()
def test_the_chosen_pass_as_if_dense_and_the_others_not_at_all():
    built, batch = made(capacity=15 / 16)
    block, dense = built.module.blocks[1], copy.deepcopy(built.module.blocks[1])
    dense.capacity_router = None
    x = built.module.embedding(batch["tokens"]) * 8.0
    tables = rope_tables(16, 4, x)
    h = x + 0.5 * block.attention(block.attention_norm(x), *tables)
    turned_away = block.capacity_router(h).squeeze(-1).argmin(dim=1)
    found, expected = block(x, *tables), dense(x, *tables)
    for b, t in enumerate(turned_away.tolist()):
        torch.testing.assert_close(found[b, t], block.final_norm(h[b, t]), rtol=1e-12, atol=1e-12)
        expected[b, t] = found[b, t]

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def counted_fraction(built, batch):
    """What the MLPs saw, counted from outside."""
    rows = []
    hooks = [b.mlp.register_forward_pre_hook(lambda _, x: rows.append(len(x[0]))) for b in built.module.blocks]
    built.module(**batch)
    for hook in hooks:
        hook.remove()
    return sum(rows) / (3 * 3 * 2 * 16)


@pytest.mark.parametrize("capacity", [1.0, 0.5])
@pytest.mark.parametrize("routing", ["static", "dynamic"])
def test_the_executed_fraction_is_measured(routing, capacity):
    built, batch = made(routing=routing, capacity=capacity)
    counted = counted_fraction(built, batch)

    assert built.facts()["executed_fraction"] == pytest.approx(counted, abs=1e-15)
    if routing == "static":
        assert counted == pytest.approx((2 + capacity) / 3, abs=1e-15)
    else:
        assert 1 / 3 < counted / ((2 + capacity) / 3) < 1
    masked, batch = made(routing=routing, capacity=capacity, dispatch="mask")
    assert counted_fraction(masked, batch) == masked.facts()["executed_fraction"] == 1.0


# Variants that change nothing.


@parametrized(
    "knobs",
    [
        {"loss": "chunked", "chunk_rows": 5},
        {"loss": "fused", "chunk_rows": 5},
        {"gqa": "native"},
        {"checkpoint": 1},
        {"checkpoint": 2, "loss": "fused"},
    ],
    quick=3,
    ids=str,
)
@pytest.mark.parametrize("routing", ["static", "dynamic"])
def test_variants_agree(knobs, routing):
    expected = results(*made(routing=routing, capacity=0.5, **WORKLOAD.reference))
    assert_equal(results(*made(routing=routing, capacity=0.5, **{"gqa": "repeated", **knobs})), expected)


@pytest.mark.parametrize("knobs", [{}, {"routing": "dynamic"}, {"loss": "fused"}, {"capacity": 0.5}], ids=str)
def test_float32_is_near_float64(knobs):
    # Rounding of 6e-8, through 3 blocks of 3 recursions and sums of 256 products: 1e-5 of the largest value.
    single, double = results(*made(torch.float32, **knobs)), results(*made(**knobs))
    for name, value in double.items():
        assert (single[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name


@no_bf16_units
@pytest.mark.parametrize("loss", ["full", "chunked", "fused"])
@pytest.mark.parametrize("kind", ["weights", "autocast"])
def test_bfloat16_weights_and_autocast(kind, loss):
    truth, batch = made()
    built, _ = made(torch.bfloat16 if kind == "weights" else torch.float32, loss=loss, chunk_rows=5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        value = built.module(**batch)
    value.backward()

    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), truth.module(**batch), rtol=0.01, atol=0)
    missing = [name for name, parameter in built.module.named_parameters() if parameter.grad is None]
    assert missing == ["blocks.1.capacity_router.weight"]


def test_tiny_trains():
    torch.manual_seed(0)
    built = build(WORKLOAD.configure("tiny", routing="dynamic", capacity=0.5, loss="fused", seq_len=32))
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=3e-3)
    batch, values = built.batch(), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = built.module(**batch)
        loss.backward()
        optimizer.step()
        values.append(loss.item())

    assert abs(values[0] - math.log(256)) < 1
    assert values[-1] < values[0] - 2


# Counting.


@pytest.mark.parametrize("capacity", [1.0, 0.5])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@torch.no_grad()
def test_forward_flops_by_formula_are_those_counted(capacity, loss):
    built, batch = made(torch.float32, capacity=capacity, loss=loss)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        built.module(**batch)

    config = built.module.config
    latent, head, kv = 16, 4, 8
    # The counter takes attention whole where the formula takes the causal half; and the first convolution also
    # computes the two zeros that the second needs in front.
    other_half = config.blocks * 2 * config.batch * config.seq_len**2 * latent
    in_front = config.blocks * 2 * config.batch * 2 * CausalConvs.TAPS * (latent * head + kv * head)
    assert counter.get_total_flops() == built.forward_flops + other_half + in_front


def test_forward_flops_of_dynamic_depth_are_not_claimed():
    assert made(routing="dynamic")[0].forward_flops is None


# Proofs.


def test_dynamic_routing_is_proven_by_rows_that_were_not_computed():
    built, _ = made(torch.float32, routing="dynamic", blocks=1)
    proof = {proof.claim: proof for proof in built.proofs}["routing=dynamic"]
    static, _ = made(torch.float32, blocks=1)
    everyone, _ = made(torch.float32, routing="dynamic", blocks=1)
    set_depth(everyone, 3.0)

    assert proof.shows(evidence_of(built)).startswith("executed fraction 0.")
    assert proof.shows(evidence_of(built, backward=False)) is not None
    assert proof.shows(evidence_of(static)) is None
    assert proof.shows(evidence_of(everyone)) is None


def test_capacity_is_proven_by_topk():
    sizes = {"blocks": 4, "recursions": 1}
    built, _ = made(torch.float32, capacity=0.5, **sizes)
    proof = {proof.claim: proof for proof in built.proofs}["capacity=0.5"]

    assert proof.shows(evidence_of(built, backward=False)) == "topk ×2"
    assert proof.shows(evidence_of(made(torch.float32, **sizes)[0], backward=False)) is None


@pytest.mark.long
def test_the_loss_is_proven():
    losses = ("full", "chunked", "fused")
    built = {loss: made(torch.float32, loss=loss, blocks=1, recursions=1)[0] for loss in losses}
    evidence = {loss: evidence_of(built[loss]) for loss in losses}
    for claimed in losses:
        (proof,) = built[claimed].proofs
        assert proof.claim == f"loss={claimed}"
        assert [ran for ran in losses if proof.shows(evidence[ran])] == [claimed]


# Compilers.

# Two warnings that torch's tracer gives itself: of autograd functions, and of tensors it meets after a break.
its_own_warnings = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)


@pytest.mark.long
@its_own_warnings
@pytest.mark.parametrize(
    "knobs",
    [{"loss": "fused", "capacity": 0.5, "recursions": 1}, {"routing": "dynamic", "dispatch": "mask", "blocks": 1}],
    ids=str,
)
def test_a_compiler_takes_it_whole(knobs):
    torch._dynamo.reset()
    built, batch = made(torch.float32, **knobs)
    expected = results(built, batch)
    built.module.zero_grad(set_to_none=True)
    torch.compile(built.module, backend="aot_eager", fullgraph=True)(**batch).backward()

    for name, parameter in built.module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.long
@its_own_warnings
def test_dynamic_compiles_with_its_break_and_counts_the_same():
    torch._dynamo.reset()
    built, batch = made(torch.float32, routing="dynamic", blocks=1)
    expected = results(built, batch)
    fraction = built.facts()
    built.module.zero_grad(set_to_none=True)
    loss = torch.compile(built.module, backend="aot_eager")(**batch)
    loss.backward()

    torch.testing.assert_close(loss.detach(), expected["loss"], rtol=1e-5, atol=1e-5)
    gradient = built.module.blocks[0].mlp.gate_up.weight.grad
    torch.testing.assert_close(gradient, expected["blocks.0.mlp.gate_up.weight"], rtol=1e-4, atol=1e-5)
    assert built.facts() == fraction and fraction["executed_fraction"] < 1


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"dim": 72}, "dim=72: must be a multiple of 8 × heads"),
        ({"kv_heads": 3}, "kv_heads=3: must divide heads"),
        ({"capacity": 0.0}, "capacity=0.0: must be above 0"),
        ({"capacity": 1.5}, "capacity=1.5: must be above 0 and at most 1"),
        ({"chunk_rows": 0}, "chunk_rows=0: must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(knobs, message):
    with pytest.raises(UsageError, match=message):
        build(WORKLOAD.configure("tiny", **knobs))
