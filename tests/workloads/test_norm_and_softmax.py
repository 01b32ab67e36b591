"""The ops norm and softmax: implementations equal, and proven; compiled too, where there is a compiler."""

from __future__ import annotations

import shutil

import pytest
import torch
from evidence import evidence_of
from variants import assert_same, built_of, results_of

from stepscope.workloads.ops import attention, norm, softmax

OPS = {
    "rms": (norm, {"kind": "rms", "width": 48}),
    "layer": (norm, {"kind": "layer", "width": 48}),
    "softmax": (softmax, {"width": 48}),
}
each_op = pytest.mark.parametrize(("op", "values"), OPS.values(), ids=OPS.keys())


@each_op
def test_torchs_own_equals_the_reference(op, values):
    reference = built_of(op.WORKLOAD, **values)
    # Not the ones and zeros it starts with: a forgotten weight or bias must show.
    state = {name: torch.randn_like(tensor) for name, tensor in reference.module.state_dict().items()}
    batch = reference.batch()
    truth = results_of(reference, state, batch)
    own = built_of(op.WORKLOAD, implementation="torch", **values)

    assert_same(results_of(own, state, batch), truth, 1e-12)
    assert_same(results_of(own, state, batch, torch.float32), truth, 1e-5)


def test_the_references_are_what_their_names_say():
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    one, zero = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)

    assert norm.handwritten_rms_norm(x, one)[0, 0].item() == pytest.approx(3 / (12.5 + 1e-5) ** 0.5)
    assert norm.handwritten_layer_norm(x, one, zero)[0, 0].item() == pytest.approx(-0.5 / (0.25 + 1e-5) ** 0.5)
    assert softmax.handwritten_softmax(torch.tensor([[1000.0, 1000.0]])).tolist() == [[0.5, 0.5]]


@each_op
def test_bfloat16_stays_bfloat16_and_is_computed_wide(op, values):
    wide = built_of(op.WORKLOAD, **values)
    batch = {name: tensor.detach().bfloat16() for name, tensor in wide.batch().items()}
    right = wide.module.double()(**{name: tensor.double() for name, tensor in batch.items()})
    for implementation in ("handwritten", "torch"):
        found = built_of(op.WORKLOAD, implementation=implementation, **values).module.bfloat16()(**batch)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), right, rtol=0.02, atol=1e-3)


@each_op
@pytest.mark.parametrize("implementation", ["handwritten", "torch"])
def test_proofs_hold_for_what_ran_and_for_nothing_else(op, values, implementation):
    evidence = evidence_of(built_of(op.WORKLOAD, implementation=implementation, **values))

    assert [claim for claim, proof in op.PROOFS.items() if proof.shows(evidence) is not None] == [implementation]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # the compiler's own, when imported
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
@pytest.mark.parametrize(
    ("op", "values"),
    [*OPS.values(), (attention, {"seq_len": 32})],
    ids=[*OPS.keys(), "attention"],
)
def test_compiled_equals_the_reference_and_proves_it(op, values):
    reference = built_of(op.WORKLOAD, **values)
    state = {name: torch.randn_like(tensor) for name, tensor in reference.module.state_dict().items()}
    batch = reference.batch()
    truth = results_of(reference, state, batch)
    compiled = built_of(op.WORKLOAD, implementation="compiled", **values)

    assert_same(results_of(compiled, state, batch, torch.float32), truth, 1e-5)
    assert compiled.proofs[0].shows(evidence_of(compiled)) is not None
