"""The ops hydra argues about: each implementation equals its reference, and a trace tells them apart."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from evidence import evidence_of
from torch.utils.flop_counter import FlopCounterMode

from stepscope.errors import UsageError
from stepscope.workloads.models.hydra import value_shift as shift_of_the_model
from stepscope.workloads.ops import contiguity, cross_entropy, value_shift

OPS = {"cross_entropy": cross_entropy, "value_shift": value_shift, "contiguity": contiguity}
IMPLEMENTATIONS = {
    "cross_entropy": ("full", "torch", "chunked", "fused"),
    "value_shift": ("cat", "pad", "roll", "copy", "gather"),
    "contiguity": ("sliced", "contiguous", "padded"),
}
EVERY = [
    (op, implementation) for op, implementations in IMPLEMENTATIONS.items() for implementation in implementations
]


def made(op, implementation, dtype=torch.float64, **knobs):
    workload = OPS[op].WORKLOAD
    torch.manual_seed(0)
    built = workload.build(workload.configure("tiny", **{**workload.gate, **knobs, "implementation": implementation}))
    built.module.to(dtype)
    batch = {}
    for name, tensor in built.batch().items():
        narrow = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        batch[name] = narrow.requires_grad_(tensor.requires_grad)
    return built, batch


def results(op, implementation, dtype=torch.float64, **knobs):
    """The output, and the gradients of inputs and parameters from a fixed random gradient."""
    built, batch = made(op, implementation, dtype, **knobs)
    out = built.module(**batch)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype))
    leaves = [tensor for tensor in batch.values() if tensor.requires_grad] + list(built.module.parameters())
    assert all(leaf.grad is not None for leaf in leaves)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("op", "implementation"), EVERY)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_implementations_agree(op, implementation, dtype, tolerance):
    # float32: sums of at most 96 products, each rounded to 6e-8.
    reference = OPS[op].WORKLOAD.reference["implementation"]
    found = results(op, implementation, getattr(torch, dtype))
    for value, expected in zip(found, results(op, reference, getattr(torch, dtype)), strict=True):
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


def test_a_value_shift_is_the_token_before():
    v = torch.arange(12.0).view(1, 3, 4)
    expected = torch.tensor([[[0.0, 1, 0, 0], [4, 5, 2, 3], [8, 9, 6, 7]]])
    for name, shift in value_shift.IMPLEMENTATIONS.items():
        assert torch.equal(shift(v), expected), name
    assert torch.equal(shift_of_the_model(v), expected)


def test_one_token_has_none_before():
    v = torch.arange(4.0).view(1, 1, 4)
    for name, shift in value_shift.IMPLEMENTATIONS.items():
        assert torch.equal(shift(v), torch.tensor([[[0.0, 1, 0, 0]]])), name


def test_what_the_last_token_holds_reaches_no_one():
    # A roll brings it round to the front, where a product with 0 would keep its NaN.
    v = torch.ones(1, 3, 4)
    v[0, 2, 2:] = torch.nan
    for name, shift in value_shift.IMPLEMENTATIONS.items():
        assert shift(v).isfinite().all(), name


def test_convolved_queries_are_those_of_the_model():
    built, batch = made("contiguity", "sliced")
    queries = batch["projected"][..., :16].transpose(1, 2)
    torch.testing.assert_close(built.module(**batch), built.module.convs(queries), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("implementation", "expected"), [("sliced", 0.0), ("contiguous", 1.0), ("padded", 1.0)])
def test_the_layout_of_the_input_is_a_fact(implementation, expected):
    built, batch = made("contiguity", implementation)
    assert built.facts() == {}
    built.module(**batch)
    assert built.facts() == {"input_contiguous": expected}


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_a_trace_tells_implementations_apart(op):
    built = {name: made(op, name, torch.float32)[0] for name in IMPLEMENTATIONS[op]}
    evidence = {name: evidence_of(one) for name, one in built.items()}
    for claimed, one in built.items():
        (proof,) = one.proofs
        assert proof.claim == f"implementation={claimed}"
        shown = {name for name in built if proof.shows(evidence[name])}
        # In float32 `full` and `torch` are one path: they differ in what a narrower dtype keeps.
        assert shown == ({"full", "torch"} if claimed in ("full", "torch") else {claimed})


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_torch_keeps_logits_in_the_dtype_of_the_head():
    losses = {name: made("cross_entropy", name, torch.bfloat16) for name in ("full", "torch")}
    dtypes = {name: built.module(**batch).dtype for name, (built, batch) in losses.items()}
    assert dtypes == {"full": torch.float32, "torch": torch.bfloat16}


@torch.no_grad()
def test_forward_flops_by_formula_are_those_counted():
    def counted(op, implementation):
        built, batch = made(op, implementation, torch.float32)
        with FlopCounterMode(display=False) as counter:
            built.module(**batch)
        return counter.get_total_flops(), built.forward_flops

    for implementation in IMPLEMENTATIONS["cross_entropy"]:
        assert counted("cross_entropy", implementation) == (2 * 96 * 32 * 500,) * 2
    assert counted("value_shift", "cat") == (0, 0)
    # The first convolution has two outputs in front that the second needs; where it pads both ends itself, four more.
    taps, latent, head, tokens = 3, 16, 4, 2 * 24
    formula = 2 * tokens * taps * latent * (head + latent)
    assert counted("contiguity", "padded") == (formula + 2 * 2 * 2 * taps * latent * head, formula)
    assert counted("contiguity", "sliced") == (formula + 2 * 2 * 6 * taps * latent * head, formula)


@pytest.mark.parametrize(
    ("op", "knobs", "message"),
    [
        ("cross_entropy", {"chunk_rows": 0}, "chunk_rows=0: must be at least 1"),
        ("value_shift", {"width": 7}, "width=7: must be even"),
        ("contiguity", {"dim": 40}, "dim=40: must be a multiple of 4 × heads"),
    ],
)
def test_impossible_sizes_are_refused(op, knobs, message):
    workload = OPS[op].WORKLOAD
    with pytest.raises(UsageError, match=message):
        workload.build(workload.configure("tiny", **knobs))
