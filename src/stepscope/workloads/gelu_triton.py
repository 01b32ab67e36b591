"""GELU and its derivative in Triton, at memory bandwidth.

The usual error function takes so many instructions that they limit the GPU. Here it is 1 − p(t) · exp(−x² ÷ 2) with
t = 1 ÷ (1 + 0.3275911 |x| ÷ √2) and a polynomial p of degree 5 (Abramowitz and Stegun, 7.1.26; the error is at most
1.5e-7, as small as float32 rounding). The derivative uses the same exponential.
"""

# Triton's decorators and kernels have no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Each of 128 threads moves 16 bytes of bfloat16 at once, twice.
BLOCK = 2048


@triton.jit
def _distribution(x):
    """Return the normal distribution's Φ(x), and exp(−x² ÷ 2)."""
    bell = tl.exp2(x * x * -0.72134752)
    t = 1.0 / (1.0 + 0.231641888 * tl.abs(x))
    p = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = p * bell
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def stepscope_gelu_forward(x, y, size, BLOCK: tl.constexpr):
    """y = x · Φ(x)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    below, _ = _distribution(value)
    tl.store(y + at, value * below, mask=at < size)


@triton.jit
def stepscope_gelu_backward(grad_y, x, grad_x, size, BLOCK: tl.constexpr):
    """The gradient times Φ(x) + x · exp(−x² ÷ 2) ÷ √2π."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + at, mask=at < size, other=0.0).to(tl.float32)
    below, bell = _distribution(value)
    tl.store(grad_x + at, grad * (below + 0.39894228 * value * bell), mask=at < size)


def forward(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        stepscope_gelu_forward[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def backward(grad_y: Tensor, x: Tensor) -> Tensor:
    grad_y, x = grad_y.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    with torch.cuda.device_of(x):
        stepscope_gelu_backward[(triton.cdiv(x.numel(), BLOCK),)](grad_y, x, grad_x, x.numel(), BLOCK=BLOCK)
    return grad_x
