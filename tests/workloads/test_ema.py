"""The complex moving average: three paths, one result; states that join; bounded memory; proofs."""

from __future__ import annotations

import math

import pytest
import torch
from evidence import evidence_of
from torch import nn
from variants import assert_same

from stepscope.workloads.ops import ema
from stepscope.workloads.ops.ema import CEMA, WORKLOAD, forward_flops

BATCH, WIDTH, STATES = 2, 6, 5
LENGTHS = [1, 5, 64, 65, 300]
# Some hundred roundings of 6e-8 each in a state's decay time, and as many in a sum over tokens.
FLOAT32 = 5e-6


def average(path, dtype=torch.float64, slow=False):
    torch.manual_seed(0)
    module = CEMA(WIDTH, STATES, path).to(dtype)
    if slow:
        nn.init.constant_(module.alpha, -3.0)
        nn.init.constant_(module.delta, -3.0)
    return module


def results(module, length, with_state, dtype=torch.float64):
    """Outputs, last state and all gradients of a loss that looks at both."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x, state = numbers(BATCH, length, WIDTH).requires_grad_(), numbers(BATCH, WIDTH, STATES, 2).requires_grad_()
    y, last = module(x, state if with_state else None)
    ((y * numbers(*y.shape)).sum() + (last * numbers(*last.shape)).sum()).backward()
    leaves = {**dict(module.named_parameters()), "x": x, **({"state": state} if with_state else {})}
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    return {"outputs": y.detach(), "last state": last.detach(), **gradients}


def test_the_loop_is_the_definition():
    """θ, φ, p, q, γ, ω as the description has them, in complex numbers of Python."""
    module = average("sequential")
    x, h = torch.randn(1, 4, WIDTH, dtype=torch.float64), torch.randn(1, WIDTH, STATES, 2, dtype=torch.float64)
    y, last = module(x, h)
    sigmoid = lambda number: 1 / (1 + math.exp(-number))  # noqa: E731

    for d in range(WIDTH):
        states = [complex(*h[0, d, k].tolist()) for k in range(STATES)]
        theta = sigmoid(module.theta[d].item()) * 2 * math.pi / STATES
        for t in range(4):
            out = module.omega[d].item() * x[0, t, d].item()
            for k in range(STATES):
                p, size = sigmoid(module.alpha[d, k].item()), sigmoid(module.delta[d, k].item())
                angle = (k + 1) * theta
                q = (1 - p * size) * complex(math.cos(angle), math.sin(angle))
                states[k] = q * states[k] + p * x[0, t, d].item()
                out += (complex(*module.gamma[d, k].tolist()) * math.sqrt(1 / STATES) * states[k]).real
            assert y[0, t, d].item() == pytest.approx(out, rel=1e-12)
        assert torch.view_as_complex(last)[0, d].tolist() == pytest.approx(states, rel=1e-12)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("path", ["fft", "scan"])
def test_paths_agree_in_outputs_last_state_and_gradients(path, length, with_state):
    truth = results(average("sequential"), length, with_state)

    assert_same(results(average(path), length, with_state), truth, 1e-10)
    assert_same(results(average(path, torch.float32), length, with_state, torch.float32), truth, FLOAT32)


@pytest.mark.parametrize("path", ["fft", "scan"])
def test_paths_agree_where_memory_is_long(path):
    """|q| = 0.998: after 300 tokens half of the first is still there."""
    truth = results(average("sequential", slow=True), 300, True)

    assert_same(results(average(path, slow=True), 300, True), truth, 1e-10)
    # Phases turn by up to 6 rad a token, with a rounding each.
    assert_same(results(average(path, torch.float32, slow=True), 300, True, torch.float32), truth, 1e-4)


@pytest.mark.parametrize("path", ["fft", "sequential", "scan"])
@pytest.mark.parametrize("split", [1, 64, 100])
def test_a_sequence_in_two_parts_is_the_sequence(path, split):
    module, x = average(path), torch.randn(BATCH, 150, WIDTH, dtype=torch.float64)
    whole, last = module(x)
    first, between = module(x[:, :split])
    second, end = module(x[:, split:], between)

    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(end, last, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", ["fft", "sequential", "scan"])
def test_low_precision_is_only_at_the_borders(path):
    """bfloat16 in and out, also under autocast; what is between is the float32 result of the same numbers."""
    x = torch.randn(BATCH, 100, WIDTH).bfloat16()
    module = average(path, torch.bfloat16)
    wanted, wanted_last = module.float()(x.float())
    module.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, last = module(x)

    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y, wanted.bfloat16(), rtol=0.01, atol=1e-5)
    torch.testing.assert_close(last, wanted_last, rtol=1e-4, atol=1e-5)


def test_fft_leaves_the_last_state_out_where_nobody_asks():
    x = torch.randn(BATCH, 100, WIDTH, dtype=torch.float64)
    y, last = average("fft")(x, None, False)

    assert last is None
    assert torch.equal(y, average("fft")(x)[0])


@pytest.mark.parametrize("path", ["fft", "scan"])
def test_nothing_as_large_as_all_states_is_ever_made(path):
    """All states of all tokens are 2·N numbers for each number of x; the largest tensor stays far below."""
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel() * tensor.element_size())
            return out

    torch.manual_seed(0)
    module, x = CEMA(8, 16, path), torch.randn(2, 4096, 8)
    with Largest():
        y, last = module(x)
        (y.sum() + last.sum()).backward()

    assert largest <= x.nbytes * 4  # an FFT of double length, complex; all states would be × 32


@pytest.mark.parametrize("path", ["fft", "scan"])
def test_calls_do_not_grow_with_the_length(path):
    counts = []
    for length in (1024, 2048):
        built = WORKLOAD.build(WORKLOAD.configure("tiny", path=path, seq_len=length))
        counts.append(sum(evidence_of(built).ops.values()))

    assert counts[1] < 1.1 * counts[0]  # one more turn of the scan over chunks


@pytest.mark.parametrize("path", ["fft", "sequential", "scan"])
def test_proofs_hold_for_what_ran_and_for_nothing_else(path):
    def built(path):
        return WORKLOAD.build(WORKLOAD.configure("tiny", path=path, with_state=True))

    evidence = evidence_of(built(path))
    shown = {claimed: built(claimed).proofs[0].shows(evidence) for claimed in ("fft", "sequential", "scan")}

    assert [claimed for claimed, words in shown.items() if words] == [path]
    assert [built(claimed).proofs[0].claim for claimed in shown] == ["path=fft", "path=sequential", "path=scan"]


def test_a_gpu_with_triton_proves_the_scan_by_its_kernel_only(monkeypatch):
    from stepscope.workloads.workload import Evidence

    monkeypatch.setattr(ema, "HAS_TRITON", True)
    (proof,) = ema.proofs("path", "scan", 96)
    products = Evidence(device="cuda", ops={"aten::baddbmm": 4}, kernels={"gemm": 4}, facts={})
    kernel = Evidence(device="cuda", ops={}, kernels={"stepscope_ema_forward": 3}, facts={})

    assert proof.shows(products) is None
    assert proof.shows(kernel) == "stepscope_ema_forward ×3"


def test_the_op_gives_what_its_knobs_say():
    config = WORKLOAD.configure()
    assert (config.batch, config.seq_len, config.width, config.num_states) == (8, 8192, 1024, 16)
    built = WORKLOAD.build(WORKLOAD.configure("tiny", with_state=True))
    batch = built.batch()
    y, last = built.module(**batch)

    assert {name: tuple(t.shape) for name, t in batch.items()} == {"x": (2, 96, 16), "state": (2, 16, 4, 2)}
    assert (y.shape, last.shape) == (batch["x"].shape, batch["state"].shape)
    assert isinstance(WORKLOAD.build(WORKLOAD.configure("tiny", last_state=False)).module(x=batch["x"]), torch.Tensor)
    assert built.num_tokens == 192
    assert built.forward_flops == forward_flops(192, 16, 4) == 192 * 16 * (4 * 14 + 2)
    assert sum(p.numel() for p in built.module.parameters()) == 16 * (4 * 4 + 2)
