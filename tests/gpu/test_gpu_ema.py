"""The moving average on a real GPU: the fused kernels against the loop, compiled, as a proof, and in a model.

Run with `python -m pytest tests/gpu -m gpu`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "workloads"))

from evidence import evidence_of

from stepscope.workloads.models.megalodon import WORKLOAD as MEGALODON
from stepscope.workloads.ops.ema import CEMA
from stepscope.workloads.ops.ema import WORKLOAD as EMA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def results(path, dtype, batch, length, width, states, with_state, compiled=False, input_dtype=None):
    """Outputs, last state and all gradients of a loss that looks at both, in float64 on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = CEMA(width, states, path).to(dtype)
        x = torch.randn(batch, length, width).to(input_dtype or dtype).requires_grad_()
        state = torch.randn(batch, width, states, 2).to(dtype).requires_grad_()
        grad_y, grad_last = torch.randn(batch, length, width), torch.randn(batch, width, states, 2)
    run = torch.compile(module, fullgraph=True) if compiled else module
    y, last = run(x, state if with_state else None)
    torch.autograd.backward((y, last), (grad_y.to(y.dtype), grad_last.to(last.dtype)))
    leaves = {**dict(module.named_parameters()), "x": x, **({"state": state} if with_state else {})}
    gradients = {f"gradient of {name}": leaf.grad.double() for name, leaf in leaves.items()}
    return {"outputs": y.detach().double(), "last state": last.detach().double(), **gradients}


def assert_same(found, wanted, tolerance):
    far = {name: ((found[name] - right).abs().max() / right.abs().max()).item() for name, right in wanted.items()}
    assert max(far.values()) <= tolerance, far


SIZES = [(2, 1, 5, 4), (1, 7, 40, 1), (3, 1000, 70, 16), (2, 513, 64, 5), (2, 64, 384, 8)]


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("path", ["fft", "scan"])
def test_paths_equal_the_loop(path, sizes, with_state):
    truth = results("sequential", torch.float64, *sizes, with_state)

    assert_same(results(path, torch.float64, *sizes, with_state), truth, 1e-10)
    # Roundings of 6e-8 over the decay time of a state and in sums over a thousand tokens.
    assert_same(results(path, torch.float32, *sizes, with_state), truth, 2e-5)


def test_bfloat16_inputs_are_rounded_at_the_borders_only():
    sizes = (2, 500, 64, 16, True)
    truth = results("sequential", torch.float32, *sizes, input_dtype=torch.bfloat16)
    assert_same(results("scan", torch.float32, *sizes, input_dtype=torch.bfloat16), truth, 0.01)


def test_the_op_stays_in_one_compiled_graph():
    sizes = (2, 300, 64, 16, True)
    truth = results("sequential", torch.float64, *sizes)
    assert_same(results("scan", torch.float32, *sizes, compiled=True), truth, 2e-5)


def test_the_second_gpu_kernel_reads_what_is_not_contiguous():
    torch.manual_seed(0)
    module = CEMA(48, 8, "scan").cuda()
    x = torch.randn(2, 48, 90, device="cuda").transpose(1, 2)
    y, last = module(x)
    wanted, wanted_last = module(x.contiguous())

    assert torch.equal(y, wanted) and torch.equal(last, wanted_last)


@pytest.mark.parametrize("path", ["fft", "sequential", "scan"])
def test_proofs_hold_for_what_ran_and_for_nothing_else(path):
    def built(path):
        with torch.device("cuda"):
            return EMA.build(EMA.configure("tiny", path=path))

    with torch.device("cuda"):
        evidence = evidence_of(built(path))
    shown = [p for p in ("fft", "sequential", "scan") if built(p).proofs[0].shows(evidence)]

    assert shown == [path]
    if path == "scan":
        names = " ".join(evidence.kernels)
        assert evidence.calls("stepscope_ema_forward") == 1
        assert "stepscope_ema_backward_input" in names and "stepscope_ema_backward_weights" in names


@pytest.mark.parametrize("ema", ["fft", "scan"])
def test_the_model_gives_the_loss_and_gradients_of_the_reference(ema):
    def run(dtype, **values):
        torch.manual_seed(0)
        with torch.device("cuda"):
            built = MEGALODON.build(MEGALODON.configure("tiny", seq_len=80, **values))
            batch = built.batch()
        module = built.module.to(dtype)
        module(**batch).backward()
        return {name: p.grad.double() for name, p in module.named_parameters()} | {"loss": module(**batch).double()}

    truth = run(torch.float64, **MEGALODON.reference)

    assert_same(run(torch.float64, ema=ema), truth, 1e-9)
    assert_same(run(torch.float32, ema=ema), truth, 1e-3)
