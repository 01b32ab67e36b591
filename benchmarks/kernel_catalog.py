"""Which kernels torch launches for which work: the ground truth for the kernel classes.

    python benchmarks/kernel_catalog.py catalog.json   # on a GPU, about a minute
    python benchmarks/kernel_catalog.py --check        # on a CPU: does every case build and run?

Each case is one labeled piece of work with the class expected of its slowest kernel, in alternatives `a|b` where
torch may choose. The file is a list of {case, expected_class, op, kernel, kind, num_calls, duration_ns}, one row per
distinct kernel of a case.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
Run = Callable[[], Any]
NUM_CALLS = 3
CASES_PER_PROFILE = 32
KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


@dataclass(frozen=True)
class Machine:
    """Where the cases run, and how big they are."""

    device: str
    small: bool

    def size(self, n: int) -> int:
        return max(16, n // 64) if self.small else n

    def rand(self, *shape: int, dtype: torch.dtype = f32, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype).requires_grad_(grad)

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, device=self.device)

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, **({"backend": "aot_eager"} if self.small else options))


@dataclass(frozen=True)
class Case:
    name: str
    expected_class: str
    build: Callable[[Machine], Run]
    needs_gpu: bool
    is_slow: bool


CASES: list[Case] = []


def add(name: str, expected: str, build: Callable[[Machine], Run], *, gpu: bool = False, slow: bool = False) -> None:
    CASES.append(Case(name, expected, build, gpu, slow))


def case(expected: str, *, gpu: bool = False, slow: bool = False) -> Callable[[Callable[[Machine], Run]], None]:
    return lambda build: add(build.__name__, expected, build, gpu=gpu, slow=slow)


def backward(function: Callable[..., Any], *inputs: torch.Tensor) -> Run:
    """Only the backward pass of `function`; the forward runs once, before."""
    out = function(*inputs)
    grad = torch.randn_like(out)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def both(name: str, classes: str, function: Callable[..., Any], inputs: Callable[[Machine], Iterable[torch.Tensor]],
         *, gpu: bool = False) -> None:  # fmt: skip
    """A case of the forward and one of the backward; `classes` is one, or `forward/backward`."""
    first, _, second = classes.partition("/")

    def forward_case(m: Machine) -> Run:
        tensors = [tensor.detach() for tensor in inputs(m)]
        return lambda: function(*tensors)

    add(name, first, forward_case, gpu=gpu)
    add(f"{name}_backward", second or first, lambda m: backward(function, *inputs(m)), gpu=gpu)


def on(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = f32) -> Callable[[Machine], Run]:
    """A case that calls `function` on random tensors; dimensions above 32 shrink for a check."""

    def build(m: Machine) -> Run:
        return functools.partial(function, *random(*shapes, dtype=dtype)(m))

    return build


def random(*shapes: tuple[int, ...], dtype: torch.dtype = f32, grad: bool = False) -> Callable[[Machine], list[Any]]:
    return lambda m: [m.rand(*(d if d <= 32 else m.size(d) for d in s), dtype=dtype, grad=grad) for s in shapes]


# --- GEMM ---
SQUARE = ((2048, 2048), (2048, 2048))
for label, dtype in (("bf16", bf16), ("fp16", f16), ("fp32", f32), ("fp64", torch.float64)):
    add(f"mm_{label}", "gemm", on(torch.mm, *SQUARE, dtype=dtype))
add("linear_bias", "gemm", on(F.linear, (2048, 1024), (4096, 1024), (4096,), dtype=bf16))
add("linear_bias_fp32", "gemm", on(F.linear, (2048, 1000), (999, 1000), (999,)))
add("linear_backward", "gemm", lambda m: backward(
    F.linear, *random((2048, 1024), (4096, 1024), (4096,), dtype=bf16, grad=True)(m)))  # fmt: skip
add("bmm", "gemm", on(torch.bmm, (32, 512, 512), (32, 512, 512), dtype=bf16))
add("baddbmm", "gemm", on(torch.baddbmm, (32, 512, 512), (32, 512, 512), (32, 512, 512), dtype=bf16))
add("mv", "gemm", on(torch.mv, (8192, 8192), (8192,)))
add("mm_split_k", "gemm", on(torch.mm, (64, 65536), (65536, 64), dtype=bf16))
add("einsum", "gemm", on(functools.partial(torch.einsum, "bij,bkj->bik"), (16, 512, 512), (16, 512, 512), dtype=bf16))


@case("gemm", gpu=True)
def mm_int8(m: Machine) -> Run:
    a = m.ints(100, 1024, 1024).to(torch.int8)
    return lambda: torch._int_mm(a, a.t())


@case("gemm")
def mm_tf32(m: Machine) -> Run:
    a, b = random(*SQUARE)(m)

    def run() -> None:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            torch.mm(a, b)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return run


@case("gemm", gpu=True)
def mm_fp8(m: Machine) -> Run:
    a = m.rand(2048, 2048).to(torch.float8_e4m3fn)
    b = m.rand(2048, 2048).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=m.device)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=bf16)


@case("gemm", gpu=True)
def grouped_mm(m: Machine) -> Run:
    a, b = m.rand(4096, 512, dtype=bf16), m.rand(8, 512, 1024, dtype=bf16)
    ends = torch.arange(512, 4097, 512, device=m.device, dtype=torch.int32)
    return lambda: torch._grouped_mm(a, b, offs=ends, out_dtype=bf16)


@case("gemm")
def lstm(m: Machine) -> Run:
    model = torch.nn.LSTM(m.size(1024), m.size(1024), num_layers=2).to(m.device)
    x = m.rand(32, 64, m.size(1024))
    return lambda: model(x)


# --- attention ---
def attend(m: Machine, backend: SDPBackend, *, grad: bool, causal: bool = True, mask: bool = False) -> Run:
    length = m.size(1024)
    q, k, v = (m.rand(4, 16, length, 64, dtype=bf16, grad=grad) for _ in range(3))
    bias = m.rand(1, 1, length, length, dtype=bf16) if mask else None
    with sdpa_kernel(backend):
        if grad:
            return backward(lambda a, b, c: F.scaled_dot_product_attention(a, b, c, bias, is_causal=causal), q, k, v)

    def run() -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal)

    return run


for label, backend in (
    ("flash", SDPBackend.FLASH_ATTENTION),
    ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    ("cudnn", SDPBackend.CUDNN_ATTENTION),
):
    for grad in (False, True):
        add(f"attention_{label}" + "_backward" * grad, "attention_backward" if grad else "attention_forward",
            functools.partial(attend, backend=backend, grad=grad), gpu=True)  # fmt: skip
MASKED = functools.partial(attend, backend=SDPBackend.EFFICIENT_ATTENTION, causal=False, mask=True)
add("attention_masked", "attention_forward", functools.partial(MASKED, grad=False), gpu=True)
add("attention_masked_backward", "attention_backward", functools.partial(MASKED, grad=True), gpu=True)
add("attention_math", "gemm|softmax|elementwise",
    functools.partial(attend, backend=SDPBackend.MATH, grad=False, causal=False))  # fmt: skip


@case("attention_forward", gpu=True)
def attention_decode(m: Machine) -> Run:
    q, k, v = (m.rand(1, 16, n, 64, dtype=bf16) for n in (1, 16384, 16384))

    def run() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, k, v)

    return run


@case("attention_backward", gpu=True)
def attention_grouped_query_backward(m: Machine) -> Run:
    q, k, v = (m.rand(4, heads, 1024, 64, dtype=bf16, grad=True) for heads in (16, 4, 4))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return backward(lambda a, b, c: F.scaled_dot_product_attention(a, b, c, enable_gqa=True), q, k, v)


# --- softmax and losses ---
both("softmax", "softmax", lambda x: x.softmax(-1), random((4096, 1024), dtype=bf16, grad=True))
both("softmax_wide", "softmax", lambda x: x.softmax(-1), random((512, 50257), grad=True))
both("softmax_middle", "softmax", lambda x: x.softmax(1), random((64, 512, 256), grad=True))
both("log_softmax", "softmax", lambda x: x.log_softmax(-1), random((4096, 4096), grad=True))


def cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device))


both("cross_entropy", "softmax", cross_entropy, random((2048, 32000), grad=True))
add("nll_loss", "reduction", lambda m: functools.partial(
    F.nll_loss, m.rand(m.size(65536), 64), m.ints(64, m.size(65536))))  # fmt: skip
PAIR = ((4096, 4096), (4096, 4096))
for loss in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits):
    both(loss.__name__, "elementwise", functools.partial(loss, reduction="none"), random(*PAIR, grad=True))

# --- norms ---
both("layer_norm", "norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b),
     random((8192, 1024), (1024,), (1024,), dtype=bf16, grad=True))  # fmt: skip
both("rms_norm", "norm", lambda x, w: F.rms_norm(x, w.shape, w), random((8192, 1024), (1024,), dtype=bf16, grad=True))
both("group_norm", "norm", lambda x: F.group_norm(x, 8), random((32, 64, 128, 128), grad=True))
both(
    "batch_norm", "norm", lambda x: F.batch_norm(x, None, None, training=True), random((32, 64, 128, 128), grad=True)
)
both("batch_norm_bf16", "norm", lambda x: F.batch_norm(x, None, None, training=True),
     random((32, 64, 128, 128), dtype=bf16, grad=True))  # fmt: skip
add("instance_norm", "norm", on(F.instance_norm, (32, 64, 128, 128)))


@case("norm")
def batch_norm_eval(m: Machine) -> Run:
    zeros, ones = torch.zeros(64, device=m.device), torch.ones(64, device=m.device)
    return functools.partial(F.batch_norm, m.rand(32, 64, m.size(128), m.size(128)), zeros, ones)


# --- elementwise ---
BIG = (4096, 4096)
for name in ("gelu", "silu", "relu", "sigmoid", "tanh"):
    both(name, "elementwise", getattr(F, name, None) or getattr(torch, name), random(BIG, dtype=bf16, grad=True))
both("dropout", "elementwise", lambda x: F.dropout(x, 0.1), random(BIG, grad=True))
both("upsample_bilinear", "elementwise", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
     random((8, 16, 128, 128), grad=True))  # fmt: skip
for name, function, shapes in (
    ("add", torch.add, (BIG, BIG)),
    ("add_broadcast", torch.add, (BIG, (4096,))),
    ("addcmul", torch.addcmul, (BIG, BIG, BIG)),
    ("lerp", lambda a, b: torch.lerp(a, b, 0.1), (BIG, BIG)),
    ("where", lambda a, b: torch.where(a > 0, a, b), (BIG, BIG)),
    ("pow", lambda a: a.pow(3), (BIG,)),
    ("masked_fill", lambda a: a.masked_fill_(a > 1, 0), (BIG,)),
    ("normal", lambda a: a.normal_(), (BIG,)),
    ("bernoulli", lambda a: a.bernoulli_(0.5), (BIG,)),
    ("tril", torch.tril, (BIG,)),
    ("complex_multiply", lambda a: torch.view_as_complex(a.view(-1, 2)) ** 2, (BIG,)),
):
    add(name, "elementwise", on(function, *shapes))
add("arange", "elementwise", lambda m: lambda: torch.arange(m.size(1 << 24), device=m.device))

# --- reductions and pooling ---
for name, function in (
    ("sum", torch.sum),
    ("sum_rows", lambda x: x.sum(0)),
    ("mean_columns", lambda x: x.mean(-1)),
    ("amax", lambda x: x.amax(-1)),
    ("max_with_index", lambda x: x.max(-1)),
    ("argmax", lambda x: x.argmax(-1)),
    ("var", lambda x: x.var(-1)),
    ("std_mean", torch.std_mean),
    ("vector_norm", torch.linalg.vector_norm),
    ("prod", lambda x: x.prod(-1)),
    ("any", torch.any),
):
    add(name, "reduction", on(function, (8192, 4096)))
add("bincount", "reduction", lambda m: functools.partial(torch.bincount, m.ints(64, m.size(1 << 22))))
both("max_pool2d", "reduction", lambda x: F.max_pool2d(x, 3, 2, 1), random((32, 64, 112, 112), grad=True))
both("avg_pool2d", "reduction", lambda x: F.avg_pool2d(x, 3, 2, 1), random((32, 64, 112, 112), grad=True))
add("adaptive_avg_pool2d", "reduction", on(lambda x: F.adaptive_avg_pool2d(x, 7), (32, 64, 112, 112)))

# --- copies, casts, fills ---
for name, function, shapes in (
    ("transposed_copy", lambda x: x.t().contiguous(), (BIG,)),
    ("cast_to_bf16", lambda x: x.bfloat16(), (BIG,)),
    ("cast_to_fp8", lambda x: x.to(torch.float8_e4m3fn), (BIG,)),
    ("cast_to_int64", lambda x: x.long(), (BIG,)),
    ("strided_copy", lambda x: x[:, ::2].clone(), (BIG,)),
    ("cat", lambda *x: torch.cat(x, -1), (BIG, BIG)),
    ("stack", lambda *x: torch.stack(x), (BIG, BIG)),
    ("reflection_pad", lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), ((32, 64, 128, 128),)),
    ("flip", lambda x: x.flip(0), (BIG,)),
    ("roll", lambda x: x.roll(5, 0), (BIG,)),
    ("permute_copy", lambda x: x.permute(0, 2, 1, 3).contiguous(), ((16, 1024, 16, 64),)),
):
    add(name, "copy_cast", on(function, *shapes))
add("clone", "memset_memcpy", on(torch.clone, BIG))
add("zero", "memset_memcpy", on(lambda x: x.zero_(), BIG))
add("fill", "memset_memcpy", on(lambda x: x.fill_(3.0), BIG))


@case("memset_memcpy")
def host_to_device(m: Machine) -> Run:
    x = torch.ones(m.size(1 << 22))
    return lambda: x.to(m.device, copy=True)


# --- embedding and indexing ---
both("embedding", "embedding_index", lambda w: F.embedding(torch.arange(8192, device=w.device) * 7 % len(w), w),
     random((32000, 512), grad=True))  # fmt: skip
add("embedding_bag", "embedding_index", lambda m: functools.partial(
    F.embedding_bag, m.ints(64, 4096, 16), m.rand(64, 256)))  # fmt: skip


def indexed(function: Callable[..., Any], *, by_row: bool) -> Callable[[Machine], Run]:
    """`function(table, index, source)`: the table of 64 rows, an index of rows or of elements, as much source."""

    def build(m: Machine) -> Run:
        width, length = m.size(4096), m.size(4096) if by_row else 64
        shape = (length,) if by_row else (length, width)
        return functools.partial(function, m.rand(64, width), m.ints(64, *shape), m.rand(length, width))

    return build


for name, by_row, function in (
    ("gather", False, lambda x, i, source: x.gather(0, i)),
    ("scatter", False, lambda x, i, source: x.scatter_(0, i, source)),
    ("scatter_add", False, lambda x, i, source: x.scatter_add_(0, i, source)),
    ("take_along_dim", False, lambda x, i, source: x.take_along_dim(i, 0)),
    ("index", True, lambda x, i, source: x[i]),
    ("index_select", True, lambda x, i, source: x.index_select(0, i)),
    ("index_add", True, lambda x, i, source: x.index_add_(0, i, source)),
    ("index_put_accumulate", True, lambda x, i, source: x.index_put_((i,), source, accumulate=True)),
    ("index_copy", True, lambda x, i, source: x.index_copy_(0, i, source)),
    ("nonzero", False, lambda x, i, source: i.nonzero()),
    ("masked_select", False, lambda x, i, source: x.masked_select(x > source)),
):
    add(name, "embedding_index", indexed(function, by_row=by_row))

# --- sorting, scanning, searching ---
for name, function in (
    ("sort_rows", lambda x: x.sort(-1)),
    ("sort_flat", lambda x: x.flatten().sort()),
    ("argsort", lambda x: x.argsort(-1)),
    ("topk", lambda x: x.topk(50, -1) if x.shape[-1] > 64 else x.topk(5, -1)),
    ("kthvalue", lambda x: x.kthvalue(3, -1)),
    ("median", lambda x: x.median(-1)),
    ("cumsum", lambda x: x.cumsum(-1)),
    ("cumsum_rows", lambda x: x.cumsum(0)),
    ("cumsum_flat", lambda x: x.flatten().cumsum(0)),
    ("cumprod", lambda x: x.cumprod(-1)),
    ("cummax", lambda x: x.cummax(-1)),
    ("logcumsumexp", lambda x: x.logcumsumexp(-1)),
    ("unique", lambda x: x.flatten().unique()),
    ("searchsorted", lambda x: torch.searchsorted(x[0].sort()[0].repeat(2).sort()[0], x)),
):
    add(name, "sort_scan", on(function, (1024, 4096)))
add("randperm", "sort_scan|elementwise", lambda m: lambda: torch.randperm(m.size(1 << 22), device=m.device))

# --- FFT and convolution ---
add("fft", "fft", on(lambda x: torch.fft.fft(torch.view_as_complex(x.view(len(x), -1, 2))), (512, 4096)))
add("rfft", "fft", on(torch.fft.rfft, (2048, 4096)))
add("rfft_odd", "fft", on(torch.fft.rfft, (2048, 4099)))
add("fft2", "fft", on(torch.fft.fft2, (16, 512, 512)))
add("irfft", "fft|copy_cast", on(lambda x: torch.fft.irfft(torch.complex(x, x)), (1024, 4097)))
both("conv1d", "convolution", functools.partial(F.conv1d, padding=1), random((32, 64, 1024), (128, 64, 3), grad=True))
both("conv2d", "convolution", functools.partial(F.conv2d, padding=1),
     random((32, 64, 112, 112), (64, 64, 3, 3), grad=True))  # fmt: skip
both("conv2d_1x1", "convolution", F.conv2d, random((32, 64, 112, 112), (64, 64, 1, 1), grad=True))
both("conv2d_bf16_channels_last", "convolution", lambda x, w: F.conv2d(
    x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last), padding=1),
    random((64, 64, 64, 64), (64, 64, 3, 3), dtype=bf16, grad=True))  # fmt: skip
both("conv2d_depthwise", "convolution", lambda x, w: F.conv2d(x, w, padding=1, groups=len(w)),
     random((32, 64, 112, 112), (64, 1, 3, 3), grad=True))  # fmt: skip
add("conv3d", "convolution", on(functools.partial(F.conv3d, padding=1), (4, 32, 16, 64, 64), (32, 32, 3, 3, 3)))
add(
    "conv_transpose2d",
    "convolution",
    on(functools.partial(F.conv_transpose2d, stride=2), (16, 64, 64, 64), (64, 64, 2, 2)),
)


# --- optimizers ---
def optimizer(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Machine], Run]:
    def build(m: Machine) -> Run:
        parameters = [m.rand(m.size(1024), m.size(1024), grad=True) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return kind(parameters, lr=1e-3, **options).step

    return build


add("adamw_loop", "elementwise", optimizer(torch.optim.AdamW, foreach=False))
add("adamw_foreach", "optimizer", optimizer(torch.optim.AdamW, foreach=True))
add("adamw_fused", "optimizer", optimizer(torch.optim.AdamW, fused=True))
add("sgd_momentum_foreach", "optimizer", optimizer(torch.optim.SGD, momentum=0.9, foreach=True))
add("sgd_momentum_fused", "optimizer", optimizer(torch.optim.SGD, momentum=0.9, fused=True))
add("adagrad_foreach", "optimizer", optimizer(torch.optim.Adagrad, foreach=True))


@case("reduction|optimizer")
def clip_gradients(m: Machine) -> Run:
    parameters = [m.rand(m.size(1024), m.size(1024), grad=True) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)


@case("optimizer", gpu=True)
def unscale_gradients(m: Machine) -> Run:
    gradients = [m.rand(1024, 1024) for _ in range(8)]
    found, scale = torch.zeros(1, device=m.device), torch.ones(1, device=m.device)
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)


# --- Triton by hand ---
if triton is not None:

    @triton.jit
    def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

    @triton.jit
    def row_softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        row = tl.load(x + tl.program_id(0) * columns + at, mask=at < columns, other=-float("inf"))
        weights = tl.exp(row - tl.max(row, axis=0))
        tl.store(out + tl.program_id(0) * columns + at, weights / tl.sum(weights, axis=0), mask=at < columns)


@case("elementwise", gpu=True)
def triton_by_hand_add(m: Machine) -> Run:
    x, y = m.rand(1 << 22), m.rand(1 << 22)
    out = torch.empty_like(x)
    return lambda: add_kernel[(x.numel() // 1024,)](x, y, out, x.numel(), BLOCK=1024)


@case("softmax", gpu=True)
def triton_by_hand_softmax(m: Machine) -> Run:
    x = m.rand(4096, 1024)
    out = torch.empty_like(x)
    return lambda: row_softmax_kernel[(4096,)](x, out, 1024, BLOCK=1024)


# --- torch.compile: last, since each takes seconds ---
def rms_norm_by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def rotate_half(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()


ROWS = random((8192, 1024), (1024,), dtype=bf16, grad=True)
for name, expected, function, inputs in (
    ("pointwise", "elementwise", lambda x, w: F.gelu(x * w + 1), ROWS),
    ("layer_norm", "norm", lambda x, w: F.layer_norm(x, w.shape, w), ROWS),
    ("rms_norm_by_hand", "norm", rms_norm_by_hand, ROWS),
    ("softmax", "softmax", lambda x, w: (x * w).softmax(-1), ROWS),
    ("cross_entropy", "softmax", cross_entropy, random((2048, 32000), dtype=bf16, grad=True)),
    ("sum", "reduction", lambda x, w: (x * w).float().sum(-1), ROWS),
    ("embedding", "embedding_index",
     lambda x, w: F.embedding(torch.arange(32768, device=x.device) * 7 % len(x), x) * w, ROWS),
    ("cast_transpose", "copy_cast", lambda x, w: x.t().contiguous().float(), ROWS),
    ("rotary", "elementwise", rotate_half, random((4, 16, 1024, 64), (1024, 64))),
    ("gated_mlp", "gemm", lambda x, w: F.silu(x @ w) * (x @ w),
     random((2048, 1024), (1024, 4096), dtype=bf16)),
    ("batch_norm", "norm", lambda x: F.relu(F.batch_norm(x, None, None, training=True)),
     random((32, 64, 64, 64), grad=True)),
    ("dropout_residual", "elementwise", lambda x, y: x + F.dropout(y, 0.1), random(*PAIR)),
    ("cumsum", "sort_scan", lambda x: x.cumsum(-1) * 2, random((1024, 4096))),
    ("var", "reduction", lambda x, w: x.float().var(-1), ROWS),
):  # fmt: skip

    def compiled_forward(m: Machine, function: Any = function, inputs: Any = inputs) -> Run:
        tensors = [tensor.detach() for tensor in inputs(m)]
        return functools.partial(m.compile(function), *tensors)

    add(f"compiled_{name}", expected, compiled_forward, slow=True)
for name, expected, function, inputs in (
    ("rms_norm_by_hand", "norm", rms_norm_by_hand, ROWS),
    ("layer_norm", "norm", lambda x, w: F.layer_norm(x, w.shape, w), ROWS),
    ("cross_entropy", "softmax", cross_entropy, random((2048, 32000), dtype=bf16, grad=True)),
    ("softmax", "softmax", lambda x: x.softmax(-1), random((8192, 1024), dtype=bf16, grad=True)),
):

    def compiled_backward(m: Machine, function: Any = function, inputs: Any = inputs) -> Run:
        return backward(m.compile(function), *inputs(m))

    add(f"compiled_{name}_backward", expected, compiled_backward, slow=True)


def flex(m: Machine, grad: bool) -> Run:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (m.rand(2, 8, 1024, 64, dtype=bf16, grad=grad) for _ in range(3))
    attend = m.compile(flex_attention)
    return backward(attend, q, k, v) if grad else functools.partial(attend, q, k, v)


add("flex_attention", "attention_forward", functools.partial(flex, grad=False), gpu=True, slow=True)
add("flex_attention_backward", "attention_backward", functools.partial(flex, grad=True), gpu=True, slow=True)


@case("optimizer|triton_fused", slow=True)
def compiled_adamw(m: Machine) -> Run:
    return m.compile(optimizer(torch.optim.AdamW, foreach=True, capturable=not m.small)(m))


@case("gemm", slow=True)
def compiled_max_autotune_mm(m: Machine) -> Run:
    a, b = random((1024, 1024), (1024, 1024), dtype=bf16)(m)
    return functools.partial(m.compile(lambda x, y: F.relu(x @ y), mode="max-autotune-no-cudagraphs"), a, b)


def profiled(runs: dict[str, Run], failures: list[str]) -> list[dict[str, Any]]:
    """Trace events of some calls of every run, each between two synchronizations inside its own annotation."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for name, run in runs.items():
            with torch.profiler.record_function(f"case {name}"):
                try:
                    for _ in range(NUM_CALLS):
                        run()
                    torch.cuda.synchronize()
                except Exception as error:
                    failures.append(f"{name}: {type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def kernels_by_case(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The distinct kernels of each case, slowest first; a kernel belongs to the case during which it was launched."""
    annotations = sorted(
        (e["ts"], e["name"].removeprefix("case "))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("case ")
    )
    starts = [start for start, _ in annotations]
    ops = {
        e["args"]["External id"]: e["name"] for e in events if e.get("cat") == "cpu_op" and "External id" in e["args"]
    }
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found: dict[str, dict[tuple[str | None, str, str], dict[str, Any]]] = {}
    for event in events:
        kind, arguments = KINDS.get(event.get("cat", "")), event.get("args", {})
        position = bisect.bisect_right(starts, launched.get(arguments.get("correlation"), event["ts"])) if kind else 0
        if not position:
            continue
        op = ops.get(arguments.get("External id"))
        empty = {"op": op, "kernel": event["name"], "kind": kind, "num_calls": 0, "duration_ns": 0}
        row = found.setdefault(annotations[position - 1][1], {}).setdefault((op, event["name"], str(kind)), empty)
        row["num_calls"] += 1
        row["duration_ns"] += round(1000 * event["dur"])
    return {name: sorted(rows.values(), key=lambda row: -row["duration_ns"]) for name, rows in found.items()}


def warm(chosen: Case, machine: Machine) -> Run:
    if chosen.is_slow:
        torch._dynamo.reset()
    torch.manual_seed(0)
    run = chosen.build(machine)
    for _ in range(2):  # compiles, picks algorithms, allocates
        run()
    return run


def batches(chosen: list[Case]) -> list[list[Case]]:
    """Eager cases share a profile, which costs more than they do; compiled ones are forgotten after their own."""
    eager = [one for one in chosen if not one.is_slow]
    shared = [eager[start : start + CASES_PER_PROFILE] for start in range(0, len(eager), CASES_PER_PROFILE)]
    return shared + [[one] for one in chosen if one.is_slow]


def record(chosen: list[Case], path: Path, budget_s: float) -> list[str]:
    """Writes the catalog; returns what did not work. Compiled cases stop when the time is up."""
    machine, began = Machine("cuda", small=False), time.monotonic()
    catalog: list[dict[str, Any]] = []
    failures: list[str] = []
    try:
        for batch in batches(chosen):
            runs: dict[str, Run] = {}
            for one in batch:
                if one.is_slow and time.monotonic() - began > budget_s:
                    failures.append(f"{one.name}: no time left")
                    continue
                try:
                    runs[one.name] = warm(one, machine)
                    torch.cuda.synchronize()
                except Exception as error:
                    failures.append(f"{one.name}: {type(error).__name__}: {error}")
            kernels = kernels_by_case(profiled(runs, failures)) if runs else {}
            for one in batch:
                if one.name in runs and one.name not in kernels:
                    failures.append(f"{one.name}: no kernel")
                for row in kernels.get(one.name, ()):
                    catalog.append({"case": one.name, "expected_class": one.expected_class, **row})
            print(f"{time.monotonic() - began:.0f} s: {batch[0].name} … {batch[-1].name}", file=sys.stderr)
    finally:
        path.write_text(json.dumps(catalog, indent=0) + "\n", encoding="utf-8")
    return failures


def check(chosen: list[Case]) -> list[str]:
    """Runs every case once on the CPU, small; returns what did not work."""
    machine, failures = Machine("cpu", small=True), []
    for one in chosen:
        if one.needs_gpu:
            continue
        try:
            warm(one, machine)
        except Exception as error:
            failures.append(f"{one.name}: {type(error).__name__}: {error}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="the JSON file to write")
    parser.add_argument("--check", action="store_true", help="only build and run every case on the CPU")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--budget-seconds", type=float, default=75, help="when compiled cases stop being started")
    arguments = parser.parse_args()
    chosen = [one for one in CASES if arguments.only in one.name]
    if arguments.check:
        failures = check(chosen)
    elif arguments.output is None or not torch.cuda.is_available():
        parser.error("give an output file and a GPU, or --check")
    else:
        failures = record(chosen, arguments.output, arguments.budget_seconds)
    num_skipped = sum(one.needs_gpu for one in chosen) if arguments.check else 0
    print("\n".join([*failures, f"{len(chosen)} cases, {num_skipped} need a GPU, {len(failures)} failed"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
