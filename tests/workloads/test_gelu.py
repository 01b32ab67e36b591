"""GELU as an op of its own: the Triton kernels in Triton's interpreter, the op in a layer, and what proves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from evidence import evidence_of
from torch.nn import functional

from stepscope.workloads.gelu import kept_gelu, kept_gelu_backward
from stepscope.workloads.ops import moe

COMPARE = """
import json, torch
from stepscope.workloads import gelu_triton

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape in ((1,), (3, 700), (2, 2048)):
        torch.manual_seed(0)
        x, grad = (torch.randn(shape) * 3).to(dtype), torch.randn(shape).to(dtype)
        x.view(-1)[0] = -12.0
        exact = x.double().requires_grad_()
        wanted = torch.nn.functional.gelu(exact)
        wanted.backward(grad.double())
        found = gelu_triton.forward(x), gelu_triton.backward(grad, x.t().contiguous().t() if x.dim() == 2 else x)
        assert [tensor.dtype for tensor in found] == [dtype, dtype]
        off = [float((f - w).abs().max()) for f, w in zip(found, (wanted.detach(), exact.grad))]
        print(json.dumps({"dtype": str(dtype), "off": max(off)}))
"""
# A unit in the last place of numbers up to 16, and of gradients of 8 bits or 11 besides.
TOLERANCE = {"torch.float32": 1e-6, "torch.bfloat16": 0.04, "torch.float16": 0.005}


def test_the_kernels_are_gelu_and_its_derivative():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]

    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 9
    assert all(one["off"] <= TOLERANCE[one["dtype"]] for one in found), found


def test_the_op_and_its_derivative_on_a_cpu():
    x = torch.randn(5, 7, dtype=torch.float64).requires_grad_()

    torch.testing.assert_close(kept_gelu(x), functional.gelu(x), rtol=0, atol=0)
    assert torch.autograd.gradcheck(kept_gelu, (x,))
    with torch.device("meta"):
        shape = kept_gelu_backward(torch.empty(2, 3), torch.empty(2, 3, dtype=torch.bfloat16))
    assert (shape.shape, shape.dtype) == ((2, 3), torch.bfloat16)


def test_a_layer_shows_which_gelu_it_has():
    kept, plain = (moe.WORKLOAD.build(moe.WORKLOAD.configure("tiny", gelu=way)) for way in ("kept", "torch"))
    (proof,) = [proof for proof in kept.proofs if proof.claim == "gelu=kept"]

    assert proof.shows(evidence_of(kept)) and not proof.shows(evidence_of(plain))
    assert not any(proof.claim.startswith("gelu") for proof in plain.proofs)
