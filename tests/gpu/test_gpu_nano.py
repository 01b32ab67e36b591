"""nano on a GPU: FlexAttention's kernels run, agree with the formula in outputs and gradients, and skip blocks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # the compiler has its own
]
sys.path.insert(0, str(Path(__file__).parents[1] / "workloads"))

from evidence import evidence_of

from stepscope.workloads.models.nano import WORKLOAD

SIZES = {"part": "attention", "seq_len": 1024, "batch": 2, "window": 128, "global_tokens": 40, "random_keys": 64}
VARIANTS = [
    {},
    {"random": "scattered"},
    {"kv_heads": 4},
    {"pattern": "dynamic"},
    {"pattern": "dynamic", "kv_heads": 2},
    {"seq_len": 1000},
    {"seq_len": 1000, "pattern": "dynamic"},
]
each_variant = pytest.mark.parametrize(
    "values", VARIANTS, ids=lambda values: " ".join(map(str, values.values())) or "-"
)


def built_on(device: str, **values):
    torch.manual_seed(0)
    with torch.device(device):
        return WORKLOAD.build(WORKLOAD.configure("decoder_tiny", **values))


def results_of(built, batch, dtype):
    """Outputs and gradients of one pass, as float64 on the CPU."""
    device = built.module.device
    # Scores keep their 24 bits, so that every dtype chooses the same tokens.
    dtypes = {name: torch.promote_types(dtype, torch.float32) if name == "importance" else dtype for name in batch}
    inputs = {name: tensor.detach().to(device, dtypes[name]).requires_grad_() for name, tensor in batch.items()}
    outputs = built.module(**inputs)
    outputs.backward(torch.ones_like(outputs) / 8)
    found = {"outputs": outputs, **{name: tensor.grad for name, tensor in inputs.items()}}
    return {name: tensor.detach().cpu().double() for name, tensor in found.items()}


# What a sum of some hundred products may lose: on the way to a float32 result they may be TF32, with 11 bits.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("attention", ["sparse_flex", "sparse_mask"])
@each_variant
def test_sparse_attention_equals_the_formula_in_float64(attention, values, dtype, tolerance):
    values = {**SIZES, "attention": attention, **values}
    reference = built_on("cpu", written_out=True, **values)
    batch = reference.batch()
    truth = results_of(reference, batch, torch.float64)
    found = results_of(built_on("cuda", **values), batch, dtype)

    for name, right in truth.items():
        distance = (found[name] - right).abs().max() / right.abs().max()
        assert distance < tolerance, f"{name} is off by {distance:.2e}"


@pytest.mark.parametrize("pattern", ["fixed", "dynamic"])
def test_flex_is_proven_in_a_whole_model_and_executes_less(pattern):
    sizes = {"pattern": pattern, "seq_len": 2048, "layers": 2}
    flex, dense = built_on("cuda", attention="sparse_flex", **sizes), built_on("cuda", **sizes)
    for built in (flex, dense):
        built.module.to(torch.bfloat16)
    with torch.device("cuda"):
        evidence, other = evidence_of(flex), evidence_of(dense)

    assert flex.proofs[0].shows(evidence)
    assert flex.proofs[0].shows(other) is None
    assert dense.proofs[0].shows(other)
    assert dense.proofs[0].shows(evidence) is None
    assert evidence.facts["attention_executed_flops"] < 0.6 * other.facts["attention_executed_flops"]
    assert evidence.facts["attention_formula_flops"] < evidence.facts["attention_executed_flops"]


def test_one_compilation_serves_every_layer_that_chooses():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    built = built_on("cuda", attention="sparse_flex", pattern="dynamic", layers=10)
    counters.clear()
    with torch.device("cuda"):
        batch = built.batch()
    for _ in range(2):
        built.module(**batch).backward()

    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("pattern", ["fixed", "dynamic"])
def test_the_whole_model_compiles_and_learns(pattern):
    torch._dynamo.reset()
    built = built_on("cuda", attention="sparse_flex", pattern=pattern, layers=2)
    model, optimizer = torch.compile(built.module), torch.optim.AdamW(built.module.parameters(), lr=1e-3)
    with torch.device("cuda"):
        batch = built.batch()
    losses = []
    for _ in range(8):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
