"""The complex moving average on a GPU: one kernel for outputs and last state, two for the gradients.

    u_t = q·u_{t−1} + x_t          y_t = Re Σ_n w_n·u_{t,n} + skip·x_t

A program owns one batch entry and BLOCK_D channels, and walks through time with their states in registers as
[BLOCK_N, BLOCK_D]. The last axis is laid over a warp's lanes first: with one warp and BLOCK_D = 32 each lane holds
all states of a channel and the sum over n needs no exchange; with 16 and 8, two and four lanes share a channel, the
sum costs one and two shuffles, and there are two and four times as many warps to hide latency.

Nothing of size [B, L, D, N] is ever in memory. G_t, the gradient of u_t, runs backwards in time:

    G_t = F_t + conj(w)·ḡ_t      F_{t−1} = conj(q)·G_t      F_{L−1} = gradient of the last state      x̄_t = Re Σ G_t

while q's gradient would need u_{t−1} beside G_t, that is both directions at once. It comes from the forward
direction instead, through the sensitivity s_t = ∂u_t/∂q = q·s_{t−1} + u_{t−1}:

    w̄ = conj(Σ ḡ_t·u_t)          q̄ = conj(w·Σ ḡ_t·s_t) + F_{L−1}·conj(s_{L−1})
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a kernel is launched; benchmarks/ema_paths.py compares them."""

    block_width: int = 8
    """Channels a program owns."""
    num_warps: int = 1
    """More than block_width ÷ 32 would spread the sum over n across warps."""


FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS = Launch(), Launch(), Launch()


@triton.jit
def _rows(pointers, stride: tl.constexpr, rows):
    """The first eight rows of those that exist: all loads are under way at once."""
    return (
        tl.load(pointers, mask=rows > 0, other=0.0),
        tl.load(pointers + stride, mask=rows > 1, other=0.0),
        tl.load(pointers + 2 * stride, mask=rows > 2, other=0.0),
        tl.load(pointers + 3 * stride, mask=rows > 3, other=0.0),
        tl.load(pointers + 4 * stride, mask=rows > 4, other=0.0),
        tl.load(pointers + 5 * stride, mask=rows > 5, other=0.0),
        tl.load(pointers + 6 * stride, mask=rows > 6, other=0.0),
        tl.load(pointers + 7 * stride, mask=rows > 7, other=0.0),
    )


@triton.jit
def _store_rows(pointers, stride: tl.constexpr, inside, y0, y1, y2, y3, y4, y5, y6, y7):
    """Eight rows, once all of them are known: a store between two steps would hold up the loads after it."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    tl.store(pointers, y0.to(dtype), mask=inside)
    tl.store(pointers + stride, y1.to(dtype), mask=inside)
    tl.store(pointers + 2 * stride, y2.to(dtype), mask=inside)
    tl.store(pointers + 3 * stride, y3.to(dtype), mask=inside)
    tl.store(pointers + 4 * stride, y4.to(dtype), mask=inside)
    tl.store(pointers + 5 * stride, y5.to(dtype), mask=inside)
    tl.store(pointers + 6 * stride, y6.to(dtype), mask=inside)
    tl.store(pointers + 7 * stride, y7.to(dtype), mask=inside)


@triton.jit
def _place(width, num_states, zero, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's channels, its states' offsets in [2, N, D] and in [B, 2, N, D], and what of both exists.

    A lane must have one channel, and states of it. Triton lays data out by how it is loaded, and some versions give a
    lane four channels that lie side by side, or one state of several: then every step pays for sums over all lanes.
    So channels are the last axis in memory too, and a zero that the compiler does not know hides that they begin at
    a multiple of four.
    """
    channel = tl.program_id(0) * BLOCK_D + zero + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    inside = channel < width
    cell = n[:, None] * width + channel[None, :]
    own = tl.program_id(1).to(tl.int64) * width * num_states * 2 + cell
    return channel, cell, own, inside, inside[None, :] & (n[:, None] < num_states)


@triton.jit
def _pair(pointer, cell, plane: tl.constexpr, exists):
    return tl.load(pointer + cell, mask=exists, other=0.0), tl.load(pointer + cell + plane, mask=exists, other=0.0)


@triton.jit
def _store_pair(pointer, cell, plane: tl.constexpr, exists, re, im):
    tl.store(pointer + cell, re, mask=exists)
    tl.store(pointer + cell + plane, im, mask=exists)


@triton.jit
def _step(re, im, row, q_re, q_im, w_re, w_im, omega):
    """u and y of the next token. The order of operations is that of fused multiply-adds: two for each part."""
    value = row.to(q_re.dtype)
    re, im = q_re * re + (value[None, :] - q_im * im), q_re * im + q_im * re
    return re, im, tl.sum(w_re * re - w_im * im, axis=0) + omega * value


@triton.jit
def _eight_steps(
    re, im, a0, a1, a2, a3, a4, a5, a6, a7, to, stride: tl.constexpr, inside, q_re, q_im, w_re, w_im, omega
):  # fmt: skip
    """u after eight more tokens, their outputs stored."""
    re, im, y0 = _step(re, im, a0, q_re, q_im, w_re, w_im, omega)
    re, im, y1 = _step(re, im, a1, q_re, q_im, w_re, w_im, omega)
    re, im, y2 = _step(re, im, a2, q_re, q_im, w_re, w_im, omega)
    re, im, y3 = _step(re, im, a3, q_re, q_im, w_re, w_im, omega)
    re, im, y4 = _step(re, im, a4, q_re, q_im, w_re, w_im, omega)
    re, im, y5 = _step(re, im, a5, q_re, q_im, w_re, w_im, omega)
    re, im, y6 = _step(re, im, a6, q_re, q_im, w_re, w_im, omega)
    re, im, y7 = _step(re, im, a7, q_re, q_im, w_re, w_im, omega)
    _store_rows(to, stride, inside, y0, y1, y2, y3, y4, y5, y6, y7)
    return re, im


@triton.jit(do_not_specialize=["zero"])
def stepscope_ema_forward(
    x, q, w, skip, state, y, last, length, zero, width: tl.constexpr, num_states: tl.constexpr,
    HAS_STATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Outputs and last state, from the first token to the last."""
    channel, cell, own, inside, exists = _place(width, num_states, zero, BLOCK_N, BLOCK_D)
    q_re, q_im = _pair(q, cell, width * num_states, exists)
    w_re, w_im = _pair(w, cell, width * num_states, exists)
    omega = tl.load(skip + channel, mask=inside, other=0.0)
    re, im = tl.zeros_like(q_re), tl.zeros_like(q_re)
    if HAS_STATE:
        re, im = _pair(state, own, width * num_states, exists)
    first = tl.program_id(1).to(tl.int64) * length * width + channel
    source, to = x + first, y + first
    rows = tl.where(inside, length, 0)
    a0, a1, a2, a3, a4, a5, a6, a7 = _rows(source, width, rows)
    b0, b1, b2, b3, b4, b5, b6, b7 = _rows(source + 8 * width, width, rows - 8)
    whole = length // 24 * 24
    for t in tl.range(0, whole, 24):
        # Rows are asked for sixteen steps before they are needed, and stay where they arrive: a copy of a
        # register that is still on its way would wait for it.
        c0, c1, c2, c3, c4, c5, c6, c7 = _rows(source + 16 * width, width, rows - t - 16)
        re, im = _eight_steps(
            re, im, a0, a1, a2, a3, a4, a5, a6, a7, to, width, inside, q_re, q_im, w_re, w_im, omega
        )  # fmt: skip
        a0, a1, a2, a3, a4, a5, a6, a7 = _rows(source + 24 * width, width, rows - t - 24)
        re, im = _eight_steps(
            re, im, b0, b1, b2, b3, b4, b5, b6, b7, to + 8 * width, width, inside, q_re, q_im, w_re, w_im, omega
        )  # fmt: skip
        b0, b1, b2, b3, b4, b5, b6, b7 = _rows(source + 32 * width, width, rows - t - 32)
        re, im = _eight_steps(
            re, im, c0, c1, c2, c3, c4, c5, c6, c7, to + 16 * width, width, inside, q_re, q_im, w_re, w_im, omega
        )  # fmt: skip
        source += 24 * width
        to += 24 * width
    for _ in tl.range(whole, length):
        row = tl.load(source, mask=inside, other=0.0)
        re, im, out = _step(re, im, row, q_re, q_im, w_re, w_im, omega)
        tl.store(to, out.to(y.dtype.element_ty), mask=inside)
        source += width
        to += width
    _store_pair(last, own, width * num_states, exists, re, im)


@triton.jit
def _step_back(f_re, f_im, row, q_re, q_im, w_re, w_im, omega):
    """F of the token before and the gradient of this one's x."""
    grad = row.to(q_re.dtype)
    re, im = f_re + w_re * grad[None, :], f_im - w_im * grad[None, :]
    return q_re * re + q_im * im, q_re * im - q_im * re, tl.sum(re, axis=0) + omega * grad


@triton.jit
def _eight_steps_back(
    re, im, a0, a1, a2, a3, a4, a5, a6, a7, to, stride: tl.constexpr, inside, q_re, q_im, w_re, w_im, omega
):  # fmt: skip
    """F after eight more tokens, the gradients of their x stored."""
    re, im, y0 = _step_back(re, im, a0, q_re, q_im, w_re, w_im, omega)
    re, im, y1 = _step_back(re, im, a1, q_re, q_im, w_re, w_im, omega)
    re, im, y2 = _step_back(re, im, a2, q_re, q_im, w_re, w_im, omega)
    re, im, y3 = _step_back(re, im, a3, q_re, q_im, w_re, w_im, omega)
    re, im, y4 = _step_back(re, im, a4, q_re, q_im, w_re, w_im, omega)
    re, im, y5 = _step_back(re, im, a5, q_re, q_im, w_re, w_im, omega)
    re, im, y6 = _step_back(re, im, a6, q_re, q_im, w_re, w_im, omega)
    re, im, y7 = _step_back(re, im, a7, q_re, q_im, w_re, w_im, omega)
    _store_rows(to, stride, inside, y0, y1, y2, y3, y4, y5, y6, y7)
    return re, im


@triton.jit(do_not_specialize=["zero"])
def stepscope_ema_backward_input(
    grad_y, q, w, skip, grad_last, grad_x, grad_state, length, zero,
    width: tl.constexpr, num_states: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of x and of the incoming state, from the last token to the first."""
    channel, cell, own, inside, exists = _place(width, num_states, zero, BLOCK_N, BLOCK_D)
    q_re, q_im = _pair(q, cell, width * num_states, exists)
    w_re, w_im = _pair(w, cell, width * num_states, exists)
    omega = tl.load(skip + channel, mask=inside, other=0.0)
    re, im = _pair(grad_last, own, width * num_states, exists)
    first = (tl.program_id(1).to(tl.int64) * length + length - 1) * width + channel
    source, to = grad_y + first, grad_x + first
    rows = tl.where(inside, length, 0)
    a0, a1, a2, a3, a4, a5, a6, a7 = _rows(source, -width, rows)
    b0, b1, b2, b3, b4, b5, b6, b7 = _rows(source - 8 * width, -width, rows - 8)
    whole = length // 24 * 24
    for t in tl.range(0, whole, 24):
        c0, c1, c2, c3, c4, c5, c6, c7 = _rows(source - 16 * width, -width, rows - t - 16)
        re, im = _eight_steps_back(
            re, im, a0, a1, a2, a3, a4, a5, a6, a7, to, -width, inside, q_re, q_im, w_re, w_im, omega
        )  # fmt: skip
        a0, a1, a2, a3, a4, a5, a6, a7 = _rows(source - 24 * width, -width, rows - t - 24)
        re, im = _eight_steps_back(
            re, im, b0, b1, b2, b3, b4, b5, b6, b7, to - 8 * width, -width, inside, q_re, q_im, w_re, w_im, omega
        )  # fmt: skip
        b0, b1, b2, b3, b4, b5, b6, b7 = _rows(source - 32 * width, -width, rows - t - 32)
        re, im = _eight_steps_back(
            re, im, c0, c1, c2, c3, c4, c5, c6, c7, to - 16 * width, -width, inside, q_re, q_im, w_re, w_im, omega
        )  # fmt: skip
        source -= 24 * width
        to -= 24 * width
    for _ in tl.range(whole, length):
        row = tl.load(source, mask=inside, other=0.0)
        re, im, out = _step_back(re, im, row, q_re, q_im, w_re, w_im, omega)
        tl.store(to, out.to(grad_x.dtype.element_ty), mask=inside)
        source -= width
        to -= width
    _store_pair(grad_state, own, width * num_states, exists, re, im)


@triton.jit
def _step_sums(
    u_re, u_im, s_re, s_im, sum_u_re, sum_u_im, sum_s_re, sum_s_im, sum_x, row, grad_row, q_re, q_im
):  # fmt: skip
    """u, its sensitivity s and the sums of both over time, one token on."""
    value, grad = row.to(q_re.dtype), grad_row.to(q_re.dtype)
    s_re, s_im = q_re * s_re + (u_re - q_im * s_im), q_re * s_im + (u_im + q_im * s_re)
    u_re, u_im = q_re * u_re + (value[None, :] - q_im * u_im), q_re * u_im + q_im * u_re
    sum_u_re += grad[None, :] * u_re
    sum_u_im += grad[None, :] * u_im
    sum_s_re += grad[None, :] * s_re
    sum_s_im += grad[None, :] * s_im
    return u_re, u_im, s_re, s_im, sum_u_re, sum_u_im, sum_s_re, sum_s_im, sum_x + grad * value


@triton.jit
def _eight_sums(
    ur, ui, sr, si, wr, wi, pr, pi, sx,
    a0, a1, a2, a3, a4, a5, a6, a7, g0, g1, g2, g3, g4, g5, g6, g7, q_re, q_im,
):  # fmt: skip
    """The same eight tokens on."""
    ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, a0, g0, q_re, q_im)
    ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, a1, g1, q_re, q_im)
    ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, a2, g2, q_re, q_im)
    ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, a3, g3, q_re, q_im)
    ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, a4, g4, q_re, q_im)
    ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, a5, g5, q_re, q_im)
    ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, a6, g6, q_re, q_im)
    ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, a7, g7, q_re, q_im)
    return ur, ui, sr, si, wr, wi, pr, pi, sx


@triton.jit(do_not_specialize=["zero"])
def stepscope_ema_backward_weights(
    x, grad_y, q, w, state, grad_last, grad_q, grad_w, grad_skip, length, zero,
    width: tl.constexpr, num_states: tl.constexpr,
    HAS_STATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of q, w and skip for each batch entry, from the first token to the last."""
    channel, cell, own, inside, exists = _place(width, num_states, zero, BLOCK_N, BLOCK_D)
    q_re, q_im = _pair(q, cell, width * num_states, exists)
    none = tl.zeros_like(q_re)
    ur, ui = none, none
    if HAS_STATE:
        ur, ui = _pair(state, own, width * num_states, exists)
    sr, si, wr, wi, pr, pi = none, none, none, none, none, none
    sx = tl.zeros((BLOCK_D,), q_re.dtype)
    first = tl.program_id(1).to(tl.int64) * length * width + channel
    values, grads = x + first, grad_y + first
    rows = tl.where(inside, length, 0)
    a0, a1, a2, a3, a4, a5, a6, a7 = _rows(values, width, rows)
    g0, g1, g2, g3, g4, g5, g6, g7 = _rows(grads, width, rows)
    b0, b1, b2, b3, b4, b5, b6, b7 = _rows(values + 8 * width, width, rows - 8)
    h0, h1, h2, h3, h4, h5, h6, h7 = _rows(grads + 8 * width, width, rows - 8)
    whole = length // 24 * 24
    for t in tl.range(0, whole, 24):
        c0, c1, c2, c3, c4, c5, c6, c7 = _rows(values + 16 * width, width, rows - t - 16)
        k0, k1, k2, k3, k4, k5, k6, k7 = _rows(grads + 16 * width, width, rows - t - 16)
        ur, ui, sr, si, wr, wi, pr, pi, sx = _eight_sums(
            ur, ui, sr, si, wr, wi, pr, pi, sx,
            a0, a1, a2, a3, a4, a5, a6, a7, g0, g1, g2, g3, g4, g5, g6, g7, q_re, q_im,
        )  # fmt: skip
        a0, a1, a2, a3, a4, a5, a6, a7 = _rows(values + 24 * width, width, rows - t - 24)
        g0, g1, g2, g3, g4, g5, g6, g7 = _rows(grads + 24 * width, width, rows - t - 24)
        ur, ui, sr, si, wr, wi, pr, pi, sx = _eight_sums(
            ur, ui, sr, si, wr, wi, pr, pi, sx,
            b0, b1, b2, b3, b4, b5, b6, b7, h0, h1, h2, h3, h4, h5, h6, h7, q_re, q_im,
        )  # fmt: skip
        b0, b1, b2, b3, b4, b5, b6, b7 = _rows(values + 32 * width, width, rows - t - 32)
        h0, h1, h2, h3, h4, h5, h6, h7 = _rows(grads + 32 * width, width, rows - t - 32)
        ur, ui, sr, si, wr, wi, pr, pi, sx = _eight_sums(
            ur, ui, sr, si, wr, wi, pr, pi, sx,
            c0, c1, c2, c3, c4, c5, c6, c7, k0, k1, k2, k3, k4, k5, k6, k7, q_re, q_im,
        )  # fmt: skip
        values += 24 * width
        grads += 24 * width
    for _ in tl.range(whole, length):
        row, grad = tl.load(values, mask=inside, other=0.0), tl.load(grads, mask=inside, other=0.0)
        ur, ui, sr, si, wr, wi, pr, pi, sx = _step_sums(ur, ui, sr, si, wr, wi, pr, pi, sx, row, grad, q_re, q_im)
        values += width
        grads += width
    w_re, w_im = _pair(w, cell, width * num_states, exists)
    f_re, f_im = _pair(grad_last, own, width * num_states, exists)
    q_grad_re = w_re * pr - w_im * pi + f_re * sr + f_im * si
    q_grad_im = f_im * sr - f_re * si - w_re * pi - w_im * pr
    _store_pair(grad_q, own, width * num_states, exists, q_grad_re, q_grad_im)
    _store_pair(grad_w, own, width * num_states, exists, wr, -wi)
    tl.store(grad_skip + tl.program_id(1) * width + channel, sx, mask=inside)


def _sizes(x: Tensor, q: Tensor, launch: Launch) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int]]:
    """Grid, the kernels' numbers and their constants."""
    batch, length, width = x.shape
    num_states = q.shape[1]
    constants = {
        "BLOCK_N": max(2, triton.next_power_of_2(num_states)),
        "BLOCK_D": launch.block_width,
        "num_warps": launch.num_warps,
        "enable_fp_fusion": True,
    }
    return (triton.cdiv(width, launch.block_width), batch), (length, 0, width, num_states), constants


def _planes(pairs: Tensor) -> Tensor:
    """Real pairs [..., D, N, 2] as the kernels have them: [..., 2, N, D]."""
    return pairs.transpose(-1, -3).contiguous()


def forward(
    x: Tensor, q: Tensor, w: Tensor, skip: Tensor, state: Tensor | None, launch: Launch = FORWARD
) -> tuple[Tensor, Tensor]:
    """Outputs [B, L, D] in x's dtype and last state [B, D, N, 2] in q's, for q and w [D, N, 2] and skip [D]."""
    x, skip, q, w = x.contiguous(), skip.contiguous(), _planes(q), _planes(w)
    y, last = torch.empty_like(x), q.new_empty(x.shape[0], *q.shape)
    grid, sizes, constants = _sizes(x, q, launch)
    first = q if state is None else _planes(state)
    with torch.cuda.device_of(x):
        stepscope_ema_forward[grid](x, q, w, skip, first, y, last, *sizes, HAS_STATE=state is not None, **constants)
    return y, _planes(last)


def backward(
    grad_y: Tensor, grad_last: Tensor, x: Tensor, q: Tensor, w: Tensor, skip: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, q, w, skip and the incoming state."""
    grad_x, grad_state = backward_input(grad_y, grad_last, q, w, skip)
    return grad_x, *backward_weights(grad_y, grad_last, x, q, w, state), grad_state


def backward_input(
    grad_y: Tensor, grad_last: Tensor, q: Tensor, w: Tensor, skip: Tensor, launch: Launch = BACKWARD_INPUT
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the incoming state."""
    grad_y, skip, grad_last, q, w = grad_y.contiguous(), skip.contiguous(), *map(_planes, (grad_last, q, w))
    grad_x, grad_state = torch.empty_like(grad_y), torch.empty_like(grad_last)
    grid, sizes, constants = _sizes(grad_y, q, launch)
    with torch.cuda.device_of(grad_y):
        stepscope_ema_backward_input[grid](grad_y, q, w, skip, grad_last, grad_x, grad_state, *sizes, **constants)
    return grad_x, _planes(grad_state)


def backward_weights(
    grad_y: Tensor,
    grad_last: Tensor,
    x: Tensor,
    q: Tensor,
    w: Tensor,
    state: Tensor | None,
    launch: Launch = BACKWARD_WEIGHTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, w and skip."""
    grad_y, x, grad_last, q, w = grad_y.contiguous(), x.contiguous(), *map(_planes, (grad_last, q, w))
    grad_q, grad_w = torch.empty_like(grad_last), torch.empty_like(grad_last)
    grad_skip = q.new_empty(x.shape[0], x.shape[2])
    grid, sizes, constants = _sizes(x, q, launch)
    first = q if state is None else _planes(state)
    with torch.cuda.device_of(x):
        stepscope_ema_backward_weights[grid](
            x, grad_y, q, w, first, grad_last, grad_q, grad_w, grad_skip, *sizes,
            HAS_STATE=state is not None, **constants,
        )  # fmt: skip
    return _planes(grad_q.sum(0)), _planes(grad_w.sum(0)), grad_skip.sum(0)
