"""Six ways to bring tokens to their experts: each against every expert computed for every token."""

from __future__ import annotations

import pytest
import torch
from evidence import evidence_of
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads.ops import moe as experts
from stepscope.workloads.ops.moe import WORKLOAD, ExpertKnobs, MixtureOfExperts, grouped_matmul, rows_per_expert

DISPATCHES = ("loop", "capacity", "one_hot", "tile", "grouped", "indexed")
# Some CPUs have no bfloat16 products; torch says so once and goes on.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")


def layer_of(dispatch="loop", num_experts=4, top_k=2, capacity_factor=None, routing="learned"):
    torch.manual_seed(0)
    factor = num_experts / top_k if capacity_factor is None else capacity_factor
    knobs = ExpertKnobs(
        experts=num_experts, top_k=top_k, d_expert=24, dispatch=dispatch, capacity_factor=factor, routing=routing
    )
    return MixtureOfExperts(16, 8, knobs).double()


def tokens(count=37):
    torch.manual_seed(1)
    return torch.randn(1, count, 16, dtype=torch.float64).requires_grad_()


def dense(layer, x, kept=None):
    """The layer by its formula, every expert for every token; `kept` [tokens, k] leaves slots out."""
    flat = x.reshape(-1, x.shape[-1])
    probabilities = layer.router(flat).softmax(-1)
    weights, chosen = probabilities.topk(layer.top_k)
    weights = weights if kept is None else weights * kept
    every = torch.stack([functional.gelu(flat @ w1) @ w2 for w1, w2 in zip(layer.w1, layer.w2)], 1)
    mixed = torch.zeros_like(flat)
    for slot in range(layer.top_k):
        mixed = mixed + weights[:, slot, None] * every[torch.arange(len(flat)), chosen[:, slot]]
    shared = layer.shared_w2(functional.gelu(layer.shared_w1(flat)))
    share = functional.one_hot(chosen, len(layer.w1)).sum((0, 1)).double() / chosen.numel()
    balance = len(layer.w1) * (share * probabilities.mean(0)).sum()
    return (mixed + layer.shared_gate(flat).sigmoid() * shared).view(x.shape), balance


def results(layer, x, run):
    out, balance = run(x)
    torch.manual_seed(2)
    loss = (out * torch.randn_like(out)).sum() + 3 * balance
    names, leaves = zip(*layer.named_parameters(), ("x", x))
    return {"out": out, "balance": balance, **dict(zip(names, torch.autograd.grad(loss, leaves)))}


def assert_same(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        torch.testing.assert_close(found[name], right, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (4, 1), (3, 3), (8, 2)])
def test_every_way_is_the_formula(dispatch, num_experts, top_k):
    layer, x = layer_of(dispatch, num_experts, top_k), tokens()

    assert_same(results(layer, x, layer), results(layer, x, lambda x: dense(layer, x)), 1e-12)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_an_expert_without_tokens_and_one_with_all(dispatch):
    layer = layer_of(dispatch)
    x = (torch.rand(1, 300, 16, dtype=torch.float64) + 1).requires_grad_()
    with torch.no_grad():
        layer.router.weight[0], layer.router.weight[1] = 1.0, -1.0

    found = results(layer, x, layer)

    assert layer.slots_per_expert[0] == 300 and layer.slots_per_expert[1] == 0
    assert found["w1"][1].abs().max() == 0 == found["w2"][1].abs().max()
    assert_same(found, results(layer, x, lambda x: dense(layer, x)), 1e-12)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_balanced_routing_is_even_and_alike(dispatch):
    layer, plain = layer_of(dispatch, 8, 2, routing="balanced"), layer_of("loop", 8, 2, routing="balanced")
    x = tokens(4096)

    found = layer(x)[0]

    torch.testing.assert_close(found, plain(x)[0], rtol=1e-12, atol=1e-12)
    probabilities = torch.rand(100, 8).double().softmax(-1)
    weights, chosen = layer._route(probabilities)
    assert (chosen[:, 0] != chosen[:, 1]).all() and torch.equal(weights, probabilities.gather(1, chosen))
    assert experts.facts([layer])["load_max_over_mean"] < 1.1


def test_what_is_over_the_capacity_is_dropped_and_counted():
    layer, x = layer_of("capacity", capacity_factor=0.9), tokens(200)
    capacity = rows_per_expert(400, 4, 0.9)
    _, chosen = layer.router(x.reshape(-1, 16)).topk(2)
    # The first `capacity` slots of each expert, in the order of the tokens, have a row.
    rank = (functional.one_hot(chosen.reshape(-1), 4).cumsum(0) * functional.one_hot(chosen.reshape(-1), 4)).sum(1)
    kept = (rank <= capacity).view(chosen.shape)
    dropped = int((~kept).sum())
    assert 0 < dropped < 200

    found = results(layer, x, layer)

    assert_same(found, results(layer, x, lambda x: dense(layer, x, kept)), 1e-12)
    facts = experts.facts([layer])
    assert facts["dropped_slots"] == dropped and facts["dropped_share"] == dropped / 400
    assert facts["dropped_flops"] == dropped * 4 * layer.w1[0].numel()
    assert (
        facts["padded_share"] == pytest.approx((4 * capacity - (400 - dropped)) / 400) and facts["padded_share"] > 0
    )


def test_capacity_is_by_eights_and_never_more_than_the_slots():
    assert rows_per_expert(1000, 4, 1.0) == 256 and rows_per_expert(1000, 4, 1.25) == 320
    assert rows_per_expert(30, 4, 4.0) == 30


def test_tiles_are_of_128_rows():
    layer = layer_of("tile")
    layer(tokens(1000))

    ends = layer.last_rows.tolist()
    counts = layer.slots_per_expert.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends)]
    assert all(end % 128 == 0 for end in ends)
    assert sizes[:-1] == [-(-count // 128) * 128 for count in counts[:-1]] and sizes[-1] >= counts[-1]
    assert experts.facts([layer])["padded_share"] == ends[-1] / 2000 - 1


def test_facts_say_the_load_of_the_busiest_layer():
    layers = [layer_of("grouped"), layer_of("grouped")]
    layers[0].slots_per_expert.copy_(torch.tensor([10, 10, 10, 10]))
    layers[1].slots_per_expert.copy_(torch.tensor([20, 0, 15, 5]))

    assert experts.facts(layers)["load_max_over_mean"] == 2.0


def test_the_grouped_product_in_bfloat16_is_one_product_an_expert():
    torch.manual_seed(0)
    rows = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(4, 16, 24, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([7, 7, 30, 40], dtype=torch.int32)

    found = grouped_matmul(rows, weights, ends)
    one_by_one = torch.cat([part @ weight for part, weight in zip(rows.split([7, 0, 23, 10]), weights)])

    torch.testing.assert_close(found, one_by_one)
    start = torch.randn_like(found)
    for left, right in zip(*(torch.autograd.grad(y, (rows, weights), start) for y in (found, one_by_one))):
        torch.testing.assert_close(left, right)


def test_autocast_reaches_the_grouped_product():
    layer = layer_of("grouped").float()
    x = tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = layer(x)
        plain, _ = layer_of("loop").float()(x)

    assert (out - plain).norm() < 0.02 * plain.norm()
    assert out.dtype == torch.bfloat16
    assert out.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_narrow_dtypes_stay_near(dispatch, dtype):
    """Float32: sums of 24 products, some roundings of 6e-8. Bfloat16: of 4e-3."""
    layer, x = layer_of(dispatch, routing="balanced"), tokens()
    truth = layer(x)[0]

    out = layer.to(dtype)(x.detach().to(dtype))[0]

    assert out.dtype == dtype
    assert (out.double() - truth).norm() < (1e-5 if dtype is torch.float32 else 2e-2) * truth.norm()


# Torch's compiler makes an instance of torch.autograd.Function, and torch warns of it.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dispatch", ["capacity", "one_hot", "tile", "grouped"])
def test_nothing_but_the_loop_waits_for_the_device(dispatch):
    """A graph without a break has no number that the host must know."""
    layer = layer_of(dispatch).bfloat16()
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = tokens().detach().bfloat16().requires_grad_()

    out, _ = compiled(x)
    out.sum().backward()

    torch.testing.assert_close(out, layer(x)[0])
    assert layer.slots_per_expert.sum() == 74


@pytest.fixture(scope="module")
def traced():
    found = {}
    for dispatch in DISPATCHES:
        torch.manual_seed(0)
        built = WORKLOAD.build(WORKLOAD.configure("tiny", dispatch=dispatch, capacity_factor=2.0))
        built.module.bfloat16()
        batch = built.batch
        object.__setattr__(built, "batch", lambda batch=batch: {"x": batch()["x"].detach().bfloat16()})
        found[dispatch] = evidence_of(built)
    return found


@pytest.mark.parametrize("claimed", DISPATCHES)
@pytest.mark.parametrize("ran", DISPATCHES)
def test_a_proof_is_there_when_its_way_ran_and_only_then(traced, claimed, ran):
    proof = experts.proof(claimed, num_layers=1, num_experts=4)
    shown = proof.shows(traced[ran])

    assert proof.claim == f"dispatch={claimed}"
    # The product of `tile` and `one_hot` is a grouped one as well: that claim holds for all three.
    assert bool(shown) == (claimed == ran or (claimed == "grouped" and ran in ("tile", "one_hot")))


def test_a_grouped_product_taken_apart_is_not_proven():
    built = WORKLOAD.build(WORKLOAD.configure("tiny", dispatch="grouped"))

    (proof,) = built.proofs
    assert proof.shows(evidence_of(built)) is None  # float32


def test_on_a_gpu_the_kernel_itself_must_be_seen(traced):
    from dataclasses import replace

    on_gpu = replace(traced["grouped"], device="cuda", kernels={"nvjet_tst_128x256": 4})
    proof = experts.proof("grouped", num_layers=1, num_experts=4)

    assert proof.shows(on_gpu) is None
    assert proof.shows(replace(on_gpu, kernels={"void at::cuda::detail::prepare_grouped_gemm_data<…>": 2}))


def test_the_formula_counts_what_the_counter_counts():
    from torch.utils.flop_counter import FlopCounterMode

    built = WORKLOAD.build(WORKLOAD.configure("tiny"))
    with FlopCounterMode(display=False) as counter:
        built.module(**built.batch())

    assert built.forward_flops == counter.get_total_flops()


@pytest.mark.parametrize(("values", "message"), [({"top_k": 5}, "top_k=5"), ({"capacity_factor": 0.0}, "positive")])
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        WORKLOAD.build(WORKLOAD.configure("tiny", **values))
