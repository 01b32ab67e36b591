"""hydra on a real GPU: variants agree, tokens that stop are not computed, and what the loss keeps in memory."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
sys.path.insert(0, str(Path(__file__).parents[1] / "workloads"))
from evidence import evidence_of

from stepscope.workloads.models.hydra import WORKLOAD, build
from stepscope.workloads.ops import contiguity, cross_entropy, value_shift
from stepscope.workloads.ops.cross_entropy import next_token_loss

SIZES = {**WORKLOAD.presets["50m"], "blocks": 3, "vocab": 5003, "batch": 2, "seq_len": 256, "chunk_rows": 100}
FLOAT32, BFLOAT16 = "float32", "bfloat16"


def made(dtype=FLOAT32, **knobs):
    torch.manual_seed(0)
    with torch.device("cuda"):
        built = build(WORKLOAD.configure("50m", **{**SIZES, **knobs}))
        return dataclasses.replace(built, module=built.module.to(getattr(torch, dtype))), built.batch()


def results(built, batch, autocast=False):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        loss = built.module(**batch)
    loss.backward()
    gradients = {name: p.grad.float() for name, p in built.module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().float(), **gradients}


def assert_near(found, expected, tolerance):
    """Each within a share of its reference's norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        off = float((found[name] - value).norm() / value.norm().clamp(min=1e-12))
        assert off <= tolerance, f"{name}: {off:.2e}"


@pytest.mark.parametrize("capacity", [1.0, 0.5])
@pytest.mark.parametrize("routing", ["static", "dynamic"])
@pytest.mark.parametrize("knobs", [{}, {"loss": "chunked"}, {"loss": "fused"}, {"checkpoint": 1}], ids=str)
def test_variants_agree_in_float32(knobs, routing, capacity):
    # Float32 products without TF32; sums of 1536 in another order.
    expected = results(*made(routing=routing, capacity=capacity, **WORKLOAD.reference))
    assert_near(results(*made(routing=routing, capacity=capacity, **knobs)), expected, 1e-3)


@pytest.mark.parametrize("gqa", ["native", "repeated"])
@pytest.mark.parametrize("loss", ["full", "chunked", "fused"])
@pytest.mark.parametrize("kind", ["weights", "autocast"])
def test_static_in_bfloat16_is_near_float32(kind, loss, gqa):
    # bfloat16 has 8 bits; the loss is a mean of 512. Routes are soft here: no token can change its mind by rounding.
    expected = results(*made(**WORKLOAD.reference))["loss"]
    built, batch = made(BFLOAT16 if kind == "weights" else FLOAT32, loss=loss, gqa=gqa)
    found = results(built, batch, autocast=kind == "autocast")["loss"]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


def test_dynamic_routing_is_proven():
    built, _ = made(routing="dynamic", capacity=0.5)

    def on_the_gpu():
        with torch.device("cuda"):
            return built.batch()

    traced = evidence_of(dataclasses.replace(built, batch=on_the_gpu))
    shown = {proof.claim: proof.shows(traced) for proof in built.proofs}
    assert all(shown.values()), shown
    assert 0 < traced.facts["executed_fraction"] < 1


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    "knobs", [{"loss": "fused"}, {"loss": "chunked", "capacity": 0.5}, {"routing": "dynamic"}], ids=str
)
def test_compiled_equals_eager(knobs):
    torch._dynamo.reset()
    expected = results(*made(**knobs))
    built, batch = made(**knobs)
    loss = torch.compile(built.module)(**batch)
    loss.backward()
    found = {name: p.grad for name, p in built.module.named_parameters() if p.grad is not None}
    assert_near({"loss": loss.detach(), **found}, expected, 2e-3)


@pytest.mark.parametrize("module", [value_shift, contiguity, cross_entropy])
def test_implementations_of_ops_agree(module):
    workload = module.WORKLOAD
    values = next(knob.values for knob in workload.knobs() if knob.name == "implementation")
    small = {"tokens": 1000, "vocab": 5003} if module is cross_entropy else {"seq_len": 1000}

    def run(implementation):
        torch.manual_seed(0)
        with torch.device("cuda"):
            built = workload.build(workload.configure(**small, implementation=implementation))
            batch = built.batch()
        out = built.module(**batch)
        torch.manual_seed(1)
        out.backward(torch.randn_like(out))
        leaves = [tensor for tensor in batch.values() if tensor.requires_grad] + list(built.module.parameters())
        return {str(index): tensor for index, tensor in enumerate((out.detach(), *(leaf.grad for leaf in leaves)))}

    expected = run(workload.reference["implementation"])
    for implementation in values:
        assert_near(run(implementation), expected, 1e-3)


# Memory, at the size that is argued about: 4 × 4096 tokens, 768 wide, 50,257 words.


def loss_bytes(kind, loss):
    """The peak above hidden states, weight and targets of the loss, forward and backward."""
    narrow = torch.bfloat16 if kind == "weights" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(16384, 768, device="cuda", dtype=narrow, requires_grad=True)
    weight = (torch.randn(50257, 768, device="cuda") * 0.02).to(narrow).requires_grad_()
    targets = torch.randint(50257, (16384,), device="cuda")
    torch.mm(hidden[:8].detach(), weight[:8].detach().t())  # the product's workspace is not the loss's
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=kind == "autocast"):
        value = next_token_loss(hidden, weight, targets, loss)
    value.backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", ["float32", "weights", "autocast"])
def test_fused_removes_four_fifths_of_the_memory_of_the_loss(kind):
    full, chunked, fused = (loss_bytes(kind, loss) for loss in ("full", "chunked", "fused"))
    print(f"{kind}: full {full / 1e9:.3f} GB, chunked {chunked / 1e9:.3f} GB, fused {fused / 1e9:.3f} GB")

    assert full >= 2 * 16384 * 50257 * 4
    assert fused <= 0.2 * full
    assert chunked <= 0.2 * full


@pytest.mark.parametrize("kind", ["float32", "autocast"])
def test_fused_removes_it_inside_hydra_100m(kind):
    def peak_above_hidden(loss):
        torch.manual_seed(0)
        with torch.device("cuda"):
            built = build(WORKLOAD.configure("100m", loss=loss))
            batch = built.batch()
        module = built.module
        hidden = torch.randn(4 * 4096, 768, device="cuda", requires_grad=True)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            hidden.copy_(module.hidden(batch["tokens"]).flatten(0, 1))
        weight, targets = module.embedding.weight, batch["targets"].flatten()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=kind == "autocast"):
            value = next_token_loss(hidden, weight, targets, loss, module.config.chunk_rows)
        value.backward()
        return torch.cuda.max_memory_allocated() - before, value.item()

    (full, full_loss), (fused, fused_loss) = peak_above_hidden("full"), peak_above_hidden("fused")
    print(f"{kind}: full {full / 1e9:.3f} GB, fused {fused / 1e9:.3f} GB: {1 - fused / full:.1%} removed")

    assert fused <= 0.2 * full
    assert fused_loss == pytest.approx(full_loss, rel=1e-3)
