"""A device as far as it decides how much memory kernels use: its properties, and scratch memory that no op shows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from stepscope.devices.limits import Device
from stepscope.planner.emulation import attention_backend as attention

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""Used by a process before its first tensor, for the context and loaded kernels; approximate, measured on an H200."""
LEAST_VISIBLE_SHARE, MOST_VISIBLE_SHARE = 0.90, 0.992
"""The share of the nominal memory that a process sees, for devices without an entry in the table: 14.56 of 16 GiB on
a T4, where error correction uses a part; 31.73 of 32 GiB on a V100."""
THREADS_PER_PROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""For compute capabilities where it is not 2048."""


@dataclass(frozen=True)
class Hardware:
    compute_capability: tuple[int, int]
    num_processors: int

    @property
    def threads_per_processor(self) -> int:
        return THREADS_PER_PROCESSOR.get(self.compute_capability, 2048)

    @property
    def workspace_bytes(self) -> int:
        """The workspace that PyTorch gives cuBLAS, per handle and stream."""
        return 32 * MIB if self.compute_capability >= (9, 0) else 8_519_680


def hardware_of(device: Device) -> Hardware | None:
    """Return the hardware of a known device, or None if it is unknown or not from NVIDIA."""
    if device.compute_capability is None or device.num_processors is None:
        return None
    return Hardware(device.compute_capability, device.num_processors)


def usable_bytes(device: Device) -> tuple[int, int]:
    """Return the least and the most memory that tensors can use on an otherwise idle device."""
    visible = device.visible_bytes
    least = int(device.memory_bytes * LEAST_VISIBLE_SHARE) if visible is None else visible
    most = int(device.memory_bytes * MOST_VISIBLE_SHARE) if visible is None else visible
    return least - CONTEXT_BYTES, most - CONTEXT_BYTES


MAX_THREADS = 512
WARP = 32
MIN_VALUES, MAX_VALUES = 16, 256  # values summed by one thread: fewer do not justify another block, more are split


def buffer_bytes(
    *,
    num_outputs: int,
    num_inputs: int,
    is_inner: bool,
    is_dense: bool,
    num_dimensions: int,
    accumulator_bytes: int,
    num_processors: int,
    threads_per_processor: int = 2048,
) -> tuple[int, int]:
    """Return the bytes of a reduction's semaphores and of its buffer; (0, 0) if each output is one block's.

    `num_inputs` are reduced to each of `num_outputs`. `is_inner`: the reduced dimension is the fastest in memory.
    `is_dense`: the fastest dimension has stride 1.

    >>> buffer_bytes(num_outputs=2304, num_inputs=8192, is_inner=False, is_dense=True, num_dimensions=2,
    ...              accumulator_bytes=4, num_processors=132)
    (72, 139198464)
    """
    if num_inputs <= 1 or num_outputs == 0:
        return 0, 0
    first, second = (num_inputs, num_outputs) if is_inner else (num_outputs, num_inputs)
    vector = 1
    if is_dense and is_inner and first > 128 and num_dimensions == 1:
        first //= 4
    elif is_dense and not is_inner:
        vector = next(size for size in (4, 2, 1) if first % size == 0)
        first //= vector
    most = MAX_THREADS // vector
    first_power, second_power = (1 << (max(1, min(size, most)).bit_length() - 1) for size in (first, second))
    height = min(second_power, most // min(first_power, WARP))
    width = min(first_power, most // height)
    inputs_step, outputs_step = (width, 1) if is_inner else (1, width)
    values = -(-num_inputs // inputs_step)
    is_split_over_warps = values >= height * MIN_VALUES or values >= MAX_VALUES
    if is_split_over_warps:
        inputs_step *= height
    else:
        outputs_step *= height
    values = -(-num_inputs // inputs_step)
    grid = -(-(num_outputs // vector) // outputs_step)
    wanted = num_processors * (threads_per_processor // (width * height))
    if not is_split_over_warps or values < MAX_VALUES or grid > wanted:
        return 0, 0
    blocks = max(min(-(-wanted // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    size = accumulator_bytes * num_outputs * blocks
    return 4 * grid, size if is_inner else size * width * vector


aten = torch.ops.aten
WIDE = {torch.float64: 8, torch.complex64: 8, torch.complex128: 16}
"""Bytes of the accumulator of a sum; 4 for other floating-point dtypes, 8 for integers."""
LIGHT_WORKSPACE_BYTES = 1 << 20  # of cuBLASLt, which adds a bias in the same kernel
ROWS_PER_THREAD = 10  # of a segment of equal indices in the backward of an embedding
LONGEST_TRANSFORM = 32768  # that one cuFFT kernel handles without a workspace
LARGEST_FACTOR = 127  # of a length that cuFFT transforms factor by factor
LONGEST_SMALL_SORT = 4096  # rows up to this length are sorted in place
FEW_INDICES = 3072  # that the backward of an embedding handles without sorting


def temporary_bytes(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[list[int]]:
    """Return groups of sizes in the order of allocation. A group is allocated together and freed before the next.

    Empty for ops without known scratch memory.
    """
    out = kwargs.get("out")
    if isinstance(out, Tensor) and torch.Tag.pointwise in func.tags and out.dtype is not args[0].dtype:
        return [[out.numel() * args[0].element_size()]]  # computed in the input's dtype and then converted
    if func in _ATTENTION:
        return attention.workspace_bytes(func, args[1], args[2], hardware.num_processors)
    rule = _RULES.get(func)
    return [rule(func, args, kwargs, hardware)] if rule is not None else []


def kept_workspaces(func: Any, args: Any, hardware: Hardware) -> dict[str, int]:
    """Return, by library, the bytes that its handle allocates at its first call and keeps."""
    if func not in GEMMS:
        return {}
    has_bias = func is aten.addmm.default and args[0].dim() == 1
    return {"cuBLAS": hardware.workspace_bytes, **({"cuBLASLt": LIGHT_WORKSPACE_BYTES} if has_bias else {})}


def hidden(func: Any, args: Any = ()) -> str | None:
    """Return why an op's memory on a CUDA device is not fully known; None if it is.

    >>> hidden(aten.convolution.default)
    "cuDNN's workspace is not counted"
    """
    if func in TRANSFORMS:
        lengths = [args[0].shape[dim] for dim in args[1]]
        return None if all(map(_is_smooth, lengths)) else f"cuFFT's workspace for lengths {lengths} is not counted"
    name = func._schema.name.partition("::")[2]
    return next((why for part, why in _HIDDEN.items() if part in name), None)


def unknown_bytes(func: Any, args: Any, out: Any) -> int:
    """Return the bytes that a verdict should allow for an op whose library chooses its workspace at run time.

    cuDNN uses what is fastest: often copies of all tensors in another layout, and less if less memory is free.
    """
    if func not in CONVOLUTIONS:
        return 0
    values = (*args, *(out if isinstance(out, tuple) else (out,)))
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _is_smooth(length: int) -> bool:
    """Return whether cuFFT can transform a length factor by factor."""
    for factor in (2, *range(3, LARGEST_FACTOR + 1, 2)):
        while length > 1 and length % factor == 0:
            length //= factor
    return length <= 1


_HIDDEN = {
    "convolution": "cuDNN's workspace is not counted",
    "mkldnn": "this is a CPU op: the memory of the CUDA op that replaces it is not counted",
    "_thnn_fused": "this is a CPU op: the memory of the CUDA op that replaces it is not counted",
    "flex_attention": "the scratch memory of its kernels is not counted",
    "ctc_loss": "cuDNN's workspace is not counted",
}  # by a part of the op's name


def _reduction(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    tensor: Tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    reduced = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    # Merge neighbors of one kind in memory order: these are the dimensions that the kernel works on.
    order = sorted((d for d in range(tensor.dim()) if tensor.shape[d] != 1), key=lambda d: -tensor.stride(d))
    runs = [is_reduced for is_reduced, _ in groupby(dim in reduced for dim in order)]
    num_inputs = math.prod(tensor.shape[dim] for dim in reduced)
    accumulator = WIDE.get(tensor.dtype, 4 if tensor.is_floating_point() else 8)
    sizes = buffer_bytes(
        num_outputs=max(1, tensor.numel() // max(1, num_inputs)),
        num_inputs=num_inputs,
        is_inner=not runs or runs[-1],
        is_dense=bool(order) and tensor.stride(order[-1]) == 1,
        num_dimensions=len(runs),
        accumulator_bytes=accumulator,
        num_processors=hardware.num_processors,
        threads_per_processor=hardware.threads_per_processor,
    )
    return [size for size in sizes if size]


def _loss(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """Return the elements of a loss before they are reduced, and the buffers of that."""
    if (args[2] if len(args) > 2 else kwargs.get("reduction", 1)) == 0:
        return []
    elements = args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
    return [elements.nbytes, *_reduction(func, (elements,), {}, hardware)]


def _embedding_backward(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    gradient, indices, num_weights, padding_index = args[:4]
    number, width = indices.numel(), gradient.shape[-1]
    if number <= FEW_INDICES and padding_index < 0:
        return []
    segments = min(number, num_weights)
    partials = number // ROWS_PER_THREAD + segments
    sort = 8 * number  # indices, their order, sorted copies of both, and where segments begin
    return [sort, sort, sort, sort, sort, 8 * partials, 4 * partials * (-(-width // 32) * 32)]


def _converted(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """A scan with a different output dtype first converts its input."""
    tensor: Tensor = args[0]
    wanted = kwargs.get("dtype") or (tensor.dtype if tensor.is_floating_point() else torch.int64)
    return [] if wanted is tensor.dtype else [tensor.numel() * wanted.itemsize]


def _transform(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """Beyond what one kernel transforms, cuFFT uses as much memory as the spectrum."""
    tensor, [*_, dim] = args[:2]
    length = tensor.shape[dim]
    if length <= LONGEST_TRANSFORM:
        return []
    complex_bytes = tensor.element_size() * (1 if tensor.is_complex() else 2)
    return [tensor.numel() // length * (length if tensor.is_complex() else length // 2 + 1) * complex_bytes]


def _put(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """Accumulates in sorted order: indices, their order, sorted copies of both, and buffers for the sort."""
    indices, accumulates = [index for index in args[1] if index is not None], len(args) > 3 and args[3]
    if not accumulates or not indices:
        return []
    return [8 * torch.broadcast_shapes(*(index.shape for index in indices)).numel()] * 6


def _sort(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """Radix sort of long rows: indices, and second buffers for values and indices."""
    tensor: Tensor = args[0]
    dim = kwargs.get("dim", args[-2] if len(args) > 2 else -1)
    if tensor.dim() == 0 or tensor.shape[dim] <= LONGEST_SMALL_SORT:
        return []
    return [8 * tensor.numel(), (8 + tensor.element_size()) * tensor.numel()]


def _products(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """Copies of matrices whose layout the library cannot read."""
    matrices = [value for value in args if isinstance(value, Tensor)][-2:]
    return [matrix.nbytes for matrix in matrices if not _is_readable(matrix)]


def _is_readable(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    return bool((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)))


_ATTENTION = (
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
TRANSFORMS = (aten._fft_r2c.default, aten._fft_c2c.default)
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
GEMMS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_RULES: dict[Any, Callable[[Any, Any, Any, Hardware], list[int]]] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _reduction),
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default), _reduction),
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), _loss),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default), _converted),
    **dict.fromkeys(GEMMS, _products),
    # logsumexp computes exp(x − max(x)) in a copy. A transform to real numbers overwrites a copy of its input.
    **dict.fromkeys((aten.logsumexp.default, aten._fft_c2r.default), lambda func, args, *_: [args[0].nbytes]),
    aten.embedding_dense_backward.default: _embedding_backward,
    # The gradient times the softmax, before its sum is subtracted.
    aten._softmax_backward_data.default: lambda func, args, *_: [
        args[0].numel() * max(args[0].element_size(), args[1].element_size())
    ],
    **dict.fromkeys(TRANSFORMS, _transform),
    **dict.fromkeys((aten.index_put_.default, aten.index_put.default), _put),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sort),
}
