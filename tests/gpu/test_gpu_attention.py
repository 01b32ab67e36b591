"""The attention op and cs336 on a GPU: each SDPA back end is the one that ran, and agrees with the formula."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # torch says why a back end cannot run, and the compiler has its own
]
sys.path.insert(0, str(Path(__file__).parents[1] / "workloads"))

from evidence import evidence_of

from stepscope.workloads.models import cs336
from stepscope.workloads.ops import attention, norm, softmax

BACKENDS = ("flash", "efficient", "math", "cudnn")


def built_on(device: str, workload, preset: str = "default", **values):
    torch.manual_seed(0)
    with torch.device(device):
        return workload.build(workload.configure(preset, **values))


def evidence_on_gpu(built, dtype):
    built.module.to(dtype)
    with torch.device("cuda"):
        batch = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in built.batch().items()}
    object.__setattr__(built, "batch", lambda: batch)
    return evidence_of(built)


@pytest.mark.parametrize("implementation", ["naive", "builtin", "custom", *BACKENDS])
def test_each_implementation_agrees_and_alone_is_proven(implementation):
    sizes = {"seq_len": 512, "batch": 2, "heads": 2}
    reference = built_on("cpu", attention.WORKLOAD, **sizes)
    batch = {name: tensor.detach().bfloat16() for name, tensor in reference.batch().items()}
    truth = reference.module(**{name: tensor.double() for name, tensor in batch.items()})
    built = built_on("cuda", attention.WORKLOAD, implementation=implementation, **sizes)
    found = built.module(**{name: tensor.cuda() for name, tensor in batch.items()})
    torch.testing.assert_close(found.cpu().double(), truth, rtol=3e-2, atol=3e-2)

    evidence = evidence_on_gpu(built, torch.bfloat16)
    assert [claim for claim, proof in attention.PROOFS.items() if proof.shows(evidence)] == [implementation]


def test_compiled_is_proven():
    built = built_on("cuda", attention.WORKLOAD, implementation="compiled", seq_len=512)
    assert built.proofs[0].shows(evidence_on_gpu(built, torch.bfloat16))


@pytest.mark.parametrize("implementation", ["flash", "cudnn"])
def test_a_back_end_that_cannot_run_float32_says_so(implementation):
    built = built_on("cuda", attention.WORKLOAD, implementation=implementation, seq_len=256)
    with torch.device("cuda"), pytest.raises(RuntimeError, match=f"'{implementation}' cannot run torch.float32"):
        built.module(**built.batch())


@pytest.mark.parametrize("op", [norm, softmax])
@pytest.mark.parametrize("implementation", ["handwritten", "torch", "compiled"])
def test_norm_and_softmax_are_proven(op, implementation):
    built = built_on("cuda", op.WORKLOAD, implementation=implementation, seq_len=256)
    assert built.proofs[0].shows(evidence_on_gpu(built, torch.bfloat16))


@pytest.mark.parametrize("way", ["naive", "builtin", "sdpa"])
def test_cs336_attention_is_proven_and_agrees(way):
    truth = built_on("cpu", cs336.WORKLOAD, "tiny")
    batch = truth.batch()
    built = built_on("cuda", cs336.WORKLOAD, "tiny", attention=way)
    built.module.load_state_dict(truth.module.state_dict())
    loss = built.module(**{name: tensor.cuda() for name, tensor in batch.items()})
    assert loss.item() == pytest.approx(truth.module.double()(**batch).item(), rel=1e-4)

    with torch.device("cuda"):
        assert built.proofs[0].shows(evidence_of(built))
