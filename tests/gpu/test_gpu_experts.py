"""Five ways to bring tokens to their experts, on a real GPU: alike, proven, and none but the loop waits.

Run with `python -m pytest tests/gpu -m gpu`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "workloads"))

from evidence import evidence_of

from stepscope.workloads.models import tsmoe
from stepscope.workloads.ops import moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DISPATCHES = ("loop", "capacity", "one_hot", "tile", "grouped", "indexed")
FAST = DISPATCHES[1:]
SIZES = {"width": 256, "d_expert": 512, "d_shared": 256, "experts": 8, "seq_len": 1000, "batch": 2}
needs_grouped = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernel is Hopper's"
)


def built_of(dispatch, dtype=torch.bfloat16, **values):
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = moe.WORKLOAD.configure(**{**SIZES, "dispatch": dispatch, "capacity_factor": 4.0, **values})
        built = moe.WORKLOAD.build(config)
        made = {name: tensor.detach().to(dtype) for name, tensor in built.batch().items()}
    built.module.to(dtype)
    object.__setattr__(built, "batch", lambda: {n: t.clone().requires_grad_() for n, t in made.items()})
    return built


def results(built, module=None):
    batch = built.batch()
    out, balance = (built.module if module is None else module)(**batch)
    torch.manual_seed(1)
    leaves = [*built.module.parameters(), batch["x"]]
    return [out, *torch.autograd.grad([out, balance], leaves, [torch.randn_like(out), torch.ones_like(balance)])]


def deviation(found, wanted):
    return max(float((f.double() - w.double()).norm() / w.double().norm()) for f, w in zip(found, wanted))


@pytest.mark.parametrize("routing", ["learned", "balanced"])
@pytest.mark.parametrize("dispatch", FAST)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_every_dispatch_is_the_loop(dispatch, routing, dtype, tolerance):
    """The same roundings of inputs on both sides: what is left is the order of sums and bfloat16 additions."""
    loop, other = (built_of(d, dtype, routing=routing) for d in ("loop", dispatch))

    assert deviation(results(other), results(loop)) < tolerance


@pytest.mark.parametrize("dispatch", FAST)
def test_experts_without_tokens_get_gradients_of_zero(dispatch):
    built = built_of(dispatch)
    loop = built_of("loop")
    for each in (built, loop):
        with torch.no_grad():
            each.module.moe.router.weight[3] = 0
            each.module.moe.router.weight[0] = 0.5
            each.module.moe.router.weight[1] = 0.4
    plain = built.batch
    for each in (built, loop):
        object.__setattr__(each, "batch", lambda: {"x": plain()["x"].detach().abs().add(1).requires_grad_()})

    found, wanted = results(built), results(loop)

    assert (built.module.moe.slots_per_expert == 0).any()
    for left, right in zip(found, wanted):
        assert left.isfinite().all()
        assert (left.double() - right.double()).norm() <= 3e-2 * right.double().norm() + 1e-6


@pytest.mark.parametrize("dispatch", FAST)
def test_it_compiles_in_one_graph_and_stays_the_same(dispatch):
    built = built_of(dispatch)
    torch.compiler.reset()
    compiled = torch.compile(built.module, fullgraph=True)

    assert deviation(results(built, compiled), results(built)) < 4e-2


@pytest.mark.parametrize("dispatch", FAST)
def test_nothing_but_the_loop_waits_for_the_gpu(dispatch):
    built = built_of(dispatch)
    batch = built.batch()
    results(built)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, _ = built.module(**batch)
        out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_loop_waits():
    built = built_of("loop")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            built.module(**built.batch())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_grouped
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_each_is_proven_in_bfloat16(dispatch):
    built = built_of(dispatch)

    assert built.proofs[0].shows(evidence_of(built))


@pytest.mark.parametrize("dispatch", ["tile", "grouped"])
def test_a_grouped_product_that_torch_takes_apart_is_not_proven(dispatch):
    built = built_of(dispatch, torch.float32)

    assert built.proofs[0].shows(evidence_of(built)) is None


@needs_grouped
@pytest.mark.parametrize("dispatch", ["capacity", "one_hot", "tile", "grouped"])
def test_the_proof_survives_the_compiler(dispatch):
    built = built_of(dispatch)
    torch.compiler.reset()
    object.__setattr__(built, "module", torch.compile(built.module))

    assert built.proofs[0].shows(evidence_of(built))


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_the_model_takes_a_step_under_autocast(dispatch):
    torch.manual_seed(0)
    with torch.device("cuda"):
        built = tsmoe.WORKLOAD.build(
            tsmoe.WORKLOAD.configure("tiny", dispatch=dispatch, routing="balanced", capacity_factor=2.0)
        )
        batch = built.batch()
    optimizer = torch.optim.AdamW(built.module.parameters(), fused=True)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = built.module(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert loss.isfinite() and built.facts()["load_max_over_mean"] < 1.5


def test_cuda_graphs_replay_and_the_counts_can_be_read():
    built = built_of("capacity")
    torch.compiler.reset()
    compiled = torch.compile(built.module, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out, _ = compiled(**built.batch())
        out.sum().backward()
        built.module.zero_grad()

    assert int(built.module.moe.slots_per_expert.sum()) == 4000
    assert built.facts()["dropped_slots"] == 0
