"""The Triton kernels of the moving average, run by Triton's interpreter on a CPU: a process of its own has it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

pytest.importorskip("triton")

CASES = [
    # batch, length, width, states, with a state coming in, block width, dtype
    (2, 1, 3, 4, True, 8, "float64"),
    (1, 9, 5, 1, False, 4, "float64"),
    (2, 49, 9, 3, True, 8, "float64"),
    (1, 24, 4, 2, False, 4, "float64"),
    (1, 20, 20, 8, True, 16, "float32"),
    (1, 12, 6, 4, False, 8, "bfloat16"),
]
# In bfloat16 it is x, outputs and x's gradient that are rounded, to 8 bits each.
TOLERANCE = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 0.02}

COMPARE = """
import json, sys
from functools import partial
import torch
from stepscope.workloads import ema_triton
from stepscope.workloads.ops import ema


def results(path, batch, length, width, states, with_state, dtype):
    torch.manual_seed(0)
    module = ema.CEMA(width, states, path)
    x, state = torch.randn(batch, length, width), torch.randn(batch, width, states, 2)
    grad_y, grad_last = torch.randn(batch, length, width), torch.randn(batch, width, states, 2)
    x, grad_y = x.to(dtype), grad_y.to(dtype)
    if dtype == torch.float64:
        module, state, grad_last = module.double(), state.double(), grad_last.double()
    x.requires_grad_(), state.requires_grad_()
    y, last = module(x, state if with_state else None)
    torch.autograd.backward((y, last), (grad_y, grad_last))
    leaves = {**dict(module.named_parameters()), "x": x, **({"state": state} if with_state else {})}
    return {"outputs": y, "last": last, **{name: leaf.grad for name, leaf in leaves.items()}}


for *sizes, block_width, dtype in json.loads(sys.argv[1]):
    for name in ("forward", "backward_input", "backward_weights"):
        setattr(ema_triton, name, partial(getattr(ema_triton, name), block_width=block_width))
    dtype = getattr(torch, dtype)
    ema._is_fused = lambda x: True
    wanted = results("sequential", *sizes, dtype)
    found = results("scan", *sizes, dtype)
    assert found.keys() == wanted.keys() and found["outputs"].dtype == dtype
    print(json.dumps({name: ((found[name] - t).abs().max() / t.abs().max()).item() for name, t in wanted.items()}))
"""


@pytest.fixture(scope="module")
def distances():
    """For each case, how far each result is from that of the loop."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPARE, json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_kernels_equal_the_loop(distances, index):
    far = distances[index]

    assert {"outputs", "last", "x", "alpha", "delta", "theta", "gamma", "omega"} <= far.keys()
    assert ("state" in far) == CASES[index][4]
    assert max(far.values()) <= TOLERANCE[CASES[index][-1]], far


def test_the_op_tells_shapes_and_dtypes_without_running():
    """What torch.compile needs to know of the op, and that the backward op fits the forward one."""
    import torch

    from stepscope.workloads.ops.ema import ema_scan, ema_scan_backward

    with torch.device("meta"):
        x, q = torch.empty(2, 9, 6, dtype=torch.bfloat16), torch.empty(6, 4, 2)
        y, last = ema_scan(x, q, torch.empty_like(q), torch.empty(6), None)
        gradients = ema_scan_backward(y, last, x, q, torch.empty_like(q), torch.empty(6), None)

    assert (y.shape, y.dtype, last.shape, last.dtype) == (x.shape, x.dtype, (2, 6, 4, 2), q.dtype)
    assert [tuple(gradient.shape) for gradient in gradients] == [(2, 9, 6), (6, 4, 2), (6, 4, 2), (6,), (2, 6, 4, 2)]


def test_the_kernels_compile_for_a_gpu(tmp_path):
    """Ahead of time for compute capability 9.0: no GPU is needed, and no state goes through shared memory."""
    script = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stepscope.workloads import ema_triton
for kernel in (
    ema_triton.stepscope_ema_forward,
    ema_triton.stepscope_ema_backward_input,
    ema_triton.stepscope_ema_backward_weights,
):
    constants = {"HAS_STATE": True, "BLOCK_N": 16, "BLOCK_D": 8, "width": 1024, "num_states": 16}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    integers = {"length", "zero"}
    types = {name: "i32" if name in integers else "*fp32" for name in kernel.arg_names}
    types.update(dict.fromkeys(constants, "constexpr"))
    source = ASTSource(kernel, signature=types, constexprs=constants)
    options = {"num_warps": 1, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(compiled.metadata.name, compiled.metadata.shared)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "stepscope_ema_forward 0",
        "stepscope_ema_backward_input 0",
        "stepscope_ema_backward_weights 0",
    ]
