"""The complex moving average on a GPU: one kernel for outputs and last state, two kernels for the gradients.

    u_t = q·u_{t−1} + x_t          y_t = Re Σ_n w_n·u_{t,n} + skip·x_t

A program owns one batch entry and BLOCK_D channels and keeps their states in registers as [BLOCK_N, BLOCK_D]. The
last axis is spread over a warp's lanes first. With BLOCK_D = 32 each lane holds all states of one channel, and the
sum over n needs no exchange. With 16 or 8, two or four lanes share a channel: the sum costs one or two shuffles, and
two or four times as many warps hide latency.

Nothing of size [B, L, D, N] is ever in memory. G_t, the gradient of u_t, is computed backward in time:

    G_t = F_t + conj(w)·ḡ_t      F_{t−1} = conj(q)·G_t      F_{L−1} = gradient of the last state      x̄_t = Re Σ G_t

The gradient of q would need u_{t−1} together with G_t, that is, both directions at once. It is computed forward in
time instead, from the sensitivity s_t = ∂u_t/∂q = q·s_{t−1} + u_{t−1}:

    w̄ = conj(Σ ḡ_t·u_t)          q̄ = conj(w·Σ ḡ_t·s_t) + F_{L−1}·conj(s_{L−1})
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WIDTH = 8  # channels per program; benchmarks/ema_paths.py compares widths


@triton.jit
def _load_rows(pointers, stride: tl.constexpr, rows):
    """Return the next eight rows, zeros beyond the last; all eight loads are in flight at once."""
    loaded = ()
    for i in tl.static_range(8):
        loaded = loaded + (tl.load(pointers + i * stride, mask=rows > i, other=0.0),)  # noqa: RUF005  Triton has no unpacking
    return loaded


@triton.jit
def _place(width, num_states, zero, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return this program's channels, its offsets in [2, N, D] and in [B, 2, N, D], and masks of what exists.

    Each lane must own one channel and states of that channel. Triton derives the layout from the loads, and some
    versions give a lane four adjacent channels, or one state of several channels; every step then sums across all
    lanes. So channels are the last axis in memory too, and adding a zero that the compiler cannot see hides that
    they start at a multiple of four.
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
def _step(re, im, row, q_re, q_im, w_re, w_im, omega, BACKWARD: tl.constexpr):
    """Return u and y of the next token; backward in time, F of the token before and the gradient of this x."""
    value = row.to(q_re.dtype)
    if BACKWARD:
        g_re, g_im = re + w_re * value[None, :], im - w_im * value[None, :]
        re, im = q_re * g_re + q_im * g_im, q_re * g_im - q_im * g_re
        out = tl.sum(g_re, axis=0) + omega * value
    else:
        # In this order each part is two fused multiply-adds.
        re, im = q_re * re + (value[None, :] - q_im * im), q_re * im + q_im * re
        out = tl.sum(w_re * re - w_im * im, axis=0) + omega * value
    return re, im, out


@triton.jit
def _eight_steps(
    re, im, rows, to, stride: tl.constexpr, inside, q_re, q_im, w_re, w_im, omega, BACKWARD: tl.constexpr
):
    """Return the state after eight more tokens and store their outputs."""
    outputs = ()
    for i in tl.static_range(8):
        re, im, out = _step(re, im, rows[i], q_re, q_im, w_re, w_im, omega, BACKWARD)
        outputs = outputs + (out,)  # noqa: RUF005  Triton has no unpacking
    # Stored together at the end: a store between two steps would delay the loads after it.
    for i in tl.static_range(8):
        tl.store(to + i * stride, outputs[i].to(to.dtype.element_ty), mask=inside)
    return re, im


@triton.jit
def _walk(
    re, im, source, to, length, stride: tl.constexpr, inside, q_re, q_im, w_re, w_im, omega, BACKWARD: tl.constexpr
):  # fmt: skip
    """Return the state after every token and store the outputs; `stride` is negative when walking backward."""
    rows = tl.where(inside, length, 0)
    a = _load_rows(source, stride, rows)
    b = _load_rows(source + 8 * stride, stride, rows - 8)
    whole = length // 24 * 24
    for t in tl.range(0, whole, 24):
        # Rows are requested sixteen steps before they are needed and stay where they arrive: copying a register
        # that is still being loaded would wait for it.
        c = _load_rows(source + 16 * stride, stride, rows - t - 16)
        re, im = _eight_steps(re, im, a, to, stride, inside, q_re, q_im, w_re, w_im, omega, BACKWARD)
        a = _load_rows(source + 24 * stride, stride, rows - t - 24)
        re, im = _eight_steps(re, im, b, to + 8 * stride, stride, inside, q_re, q_im, w_re, w_im, omega, BACKWARD)
        b = _load_rows(source + 32 * stride, stride, rows - t - 32)
        re, im = _eight_steps(re, im, c, to + 16 * stride, stride, inside, q_re, q_im, w_re, w_im, omega, BACKWARD)
        source += 24 * stride
        to += 24 * stride
    for _ in tl.range(whole, length):
        row = tl.load(source, mask=inside, other=0.0)
        re, im, out = _step(re, im, row, q_re, q_im, w_re, w_im, omega, BACKWARD)
        tl.store(to, out.to(to.dtype.element_ty), mask=inside)
        source += stride
        to += stride
    return re, im


@triton.jit(do_not_specialize=["zero"])
def stepscope_ema_forward(
    x, q, w, skip, state, y, last, length, zero, width: tl.constexpr, num_states: tl.constexpr,
    HAS_STATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute outputs and last state, from the first token to the last."""
    channel, cell, own, inside, exists = _place(width, num_states, zero, BLOCK_N, BLOCK_D)
    q_re, q_im = _pair(q, cell, width * num_states, exists)
    w_re, w_im = _pair(w, cell, width * num_states, exists)
    omega = tl.load(skip + channel, mask=inside, other=0.0)
    re, im = tl.zeros_like(q_re), tl.zeros_like(q_re)
    if HAS_STATE:
        re, im = _pair(state, own, width * num_states, exists)
    first = tl.program_id(1).to(tl.int64) * length * width + channel
    re, im = _walk(re, im, x + first, y + first, length, width, inside, q_re, q_im, w_re, w_im, omega, False)
    _store_pair(last, own, width * num_states, exists, re, im)


@triton.jit(do_not_specialize=["zero"])
def stepscope_ema_backward_input(
    grad_y, q, w, skip, grad_last, grad_x, grad_state, length, zero,
    width: tl.constexpr, num_states: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of x and of the incoming state, from the last token to the first."""
    channel, cell, own, inside, exists = _place(width, num_states, zero, BLOCK_N, BLOCK_D)
    q_re, q_im = _pair(q, cell, width * num_states, exists)
    w_re, w_im = _pair(w, cell, width * num_states, exists)
    omega = tl.load(skip + channel, mask=inside, other=0.0)
    re, im = _pair(grad_last, own, width * num_states, exists)
    first = (tl.program_id(1).to(tl.int64) * length + length - 1) * width + channel
    re, im = _walk(
        re, im, grad_y + first, grad_x + first, length, -width, inside, q_re, q_im, w_re, w_im, omega, True
    )
    _store_pair(grad_state, own, width * num_states, exists, re, im)


@triton.jit
def _step_sums(sums, row, grad_row, q_re, q_im):
    """Return u, its sensitivity s, and the sums over time of ḡ·u, ḡ·s and ḡ·x, after one more token."""
    u_re, u_im, s_re, s_im, sum_u_re, sum_u_im, sum_s_re, sum_s_im, sum_x = sums
    value, grad = row.to(q_re.dtype), grad_row.to(q_re.dtype)
    s_re, s_im = q_re * s_re + (u_re - q_im * s_im), q_re * s_im + (u_im + q_im * s_re)
    u_re, u_im = q_re * u_re + (value[None, :] - q_im * u_im), q_re * u_im + q_im * u_re
    sum_u_re += grad[None, :] * u_re
    sum_u_im += grad[None, :] * u_im
    sum_s_re += grad[None, :] * s_re
    sum_s_im += grad[None, :] * s_im
    return u_re, u_im, s_re, s_im, sum_u_re, sum_u_im, sum_s_re, sum_s_im, sum_x + grad * value


@triton.jit
def _eight_sums(sums, rows, grad_rows, q_re, q_im):
    for i in tl.static_range(8):
        sums = _step_sums(sums, rows[i], grad_rows[i], q_re, q_im)
    return sums


@triton.jit(do_not_specialize=["zero"])
def stepscope_ema_backward_weights(
    x, grad_y, q, w, state, grad_last, grad_q, grad_w, grad_skip, length, zero,
    width: tl.constexpr, num_states: tl.constexpr,
    HAS_STATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, w and skip for each batch entry, from the first token to the last."""
    channel, cell, own, inside, exists = _place(width, num_states, zero, BLOCK_N, BLOCK_D)
    q_re, q_im = _pair(q, cell, width * num_states, exists)
    none = tl.zeros_like(q_re)
    u_re, u_im = none, none
    if HAS_STATE:
        u_re, u_im = _pair(state, own, width * num_states, exists)
    sums = (u_re, u_im, none, none, none, none, none, none, tl.zeros((BLOCK_D,), q_re.dtype))
    first = tl.program_id(1).to(tl.int64) * length * width + channel
    values, grads = x + first, grad_y + first
    rows = tl.where(inside, length, 0)
    a, grad_a = _load_rows(values, width, rows), _load_rows(grads, width, rows)
    b, grad_b = _load_rows(values + 8 * width, width, rows - 8), _load_rows(grads + 8 * width, width, rows - 8)
    whole = length // 24 * 24
    for t in tl.range(0, whole, 24):
        c = _load_rows(values + 16 * width, width, rows - t - 16)
        grad_c = _load_rows(grads + 16 * width, width, rows - t - 16)
        sums = _eight_sums(sums, a, grad_a, q_re, q_im)
        a = _load_rows(values + 24 * width, width, rows - t - 24)
        grad_a = _load_rows(grads + 24 * width, width, rows - t - 24)
        sums = _eight_sums(sums, b, grad_b, q_re, q_im)
        b = _load_rows(values + 32 * width, width, rows - t - 32)
        grad_b = _load_rows(grads + 32 * width, width, rows - t - 32)
        sums = _eight_sums(sums, c, grad_c, q_re, q_im)
        values += 24 * width
        grads += 24 * width
    for _ in tl.range(whole, length):
        row, grad = tl.load(values, mask=inside, other=0.0), tl.load(grads, mask=inside, other=0.0)
        sums = _step_sums(sums, row, grad, q_re, q_im)
        values += width
        grads += width
    _, _, s_re, s_im, sum_u_re, sum_u_im, sum_s_re, sum_s_im, sum_x = sums
    w_re, w_im = _pair(w, cell, width * num_states, exists)
    f_re, f_im = _pair(grad_last, own, width * num_states, exists)
    q_grad_re = w_re * sum_s_re - w_im * sum_s_im + f_re * s_re + f_im * s_im
    q_grad_im = f_im * s_re - f_re * s_im - w_re * sum_s_im - w_im * sum_s_re
    _store_pair(grad_q, own, width * num_states, exists, q_grad_re, q_grad_im)
    _store_pair(grad_w, own, width * num_states, exists, sum_u_re, -sum_u_im)
    tl.store(grad_skip + tl.program_id(1) * width + channel, sum_x, mask=inside)


def _sizes(x: Tensor, q: Tensor, block_width: int) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int]]:
    """Return the grid, the integer arguments and the constants of the kernels."""
    batch, length, width = x.shape
    num_states = q.shape[1]
    constants = {
        "BLOCK_N": max(2, triton.next_power_of_2(num_states)),
        "BLOCK_D": block_width,
        "num_warps": 1,  # more than block_width ÷ 32 would split the sum over n across warps
        "enable_fp_fusion": True,
    }
    return (triton.cdiv(width, block_width), batch), (length, 0, width, num_states), constants


def _planes(pairs: Tensor) -> Tensor:
    """Return real pairs [..., D, N, 2] in the kernels' layout [..., 2, N, D]."""
    return pairs.transpose(-1, -3).contiguous()


def forward(
    x: Tensor, q: Tensor, w: Tensor, skip: Tensor, state: Tensor | None, block_width: int = BLOCK_WIDTH
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, L, D] in x's dtype and last state [B, D, N, 2], for q and w [D, N, 2] and skip [D]."""
    x, skip, q, w = x.contiguous(), skip.contiguous(), _planes(q), _planes(w)
    y, last = torch.empty_like(x), q.new_empty(x.shape[0], *q.shape)
    grid, sizes, constants = _sizes(x, q, block_width)
    first = q if state is None else _planes(state)
    with torch.cuda.device_of(x):
        stepscope_ema_forward[grid](x, q, w, skip, first, y, last, *sizes, HAS_STATE=state is not None, **constants)
    return y, _planes(last)


def backward(
    grad_y: Tensor, grad_last: Tensor, x: Tensor, q: Tensor, w: Tensor, skip: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_x, grad_state = backward_input(grad_y, grad_last, q, w, skip)
    return grad_x, *backward_weights(grad_y, grad_last, x, q, w, state), grad_state


def backward_input(
    grad_y: Tensor, grad_last: Tensor, q: Tensor, w: Tensor, skip: Tensor, block_width: int = BLOCK_WIDTH
) -> tuple[Tensor, Tensor]:
    grad_y, skip, grad_last, q, w = grad_y.contiguous(), skip.contiguous(), *map(_planes, (grad_last, q, w))
    grad_x, grad_state = torch.empty_like(grad_y), torch.empty_like(grad_last)
    grid, sizes, constants = _sizes(grad_y, q, block_width)
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
    block_width: int = BLOCK_WIDTH,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_y, x, grad_last, q, w = grad_y.contiguous(), x.contiguous(), *map(_planes, (grad_last, q, w))
    grad_q, grad_w = torch.empty_like(grad_last), torch.empty_like(grad_last)
    grad_skip = q.new_empty(x.shape[0], x.shape[2])
    grid, sizes, constants = _sizes(x, q, block_width)
    first = q if state is None else _planes(state)
    with torch.cuda.device_of(x):
        stepscope_ema_backward_weights[grid](
            x, grad_y, q, w, first, grad_last, grad_q, grad_w, grad_skip, *sizes,
            HAS_STATE=state is not None, **constants,
        )  # fmt: skip
    return _planes(grad_q.sum(0)), _planes(grad_w.sum(0)), grad_skip.sum(0)
