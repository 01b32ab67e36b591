"""What CUDA's kernels take and give back inside one op, where no dispatch mode sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.plan import attention
from stepscope.plan.hardware import Hardware
from stepscope.plan.reduction import buffer_bytes

aten = torch.ops.aten
WIDE = {torch.float64: 8, torch.complex64: 8, torch.complex128: 16}
"""Bytes of the accumulator of a sum; 4 for other floating-point dtypes, 8 for whole numbers."""
ROWS_PER_THREAD = 10
"""Of a segment of equal indices in the backward of an embedding."""
FEW_INDICES = 3072
"""So many the backward of an embedding handles without sorting."""


def temporary_bytes(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """The sizes, in the order they are asked for; none for an op that is not known to take any."""
    out = kwargs.get("out")
    if isinstance(out, Tensor) and torch.Tag.pointwise in func.tags and out.dtype is not args[0].dtype:
        return [out.numel() * args[0].element_size()]  # computed in the input's dtype, then converted
    rule = _RULES.get(func)
    return rule(func, args, kwargs, hardware) if rule is not None else []


def _reduction(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    tensor: Tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    reduced = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    # In memory order, neighbours of one kind as one: what is left is what the kernel works on.
    order = sorted((d for d in range(tensor.dim()) if tensor.shape[d] != 1), key=lambda d: -tensor.stride(d))
    kinds = [dim in reduced for dim in order]
    runs = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    num_inputs = 1
    for dim in reduced:
        num_inputs *= tensor.shape[dim]
    accumulator = WIDE.get(tensor.dtype, 4 if tensor.is_floating_point() else 8)
    sizes = buffer_bytes(
        num_outputs=max(1, tensor.numel() // max(1, num_inputs)),
        num_inputs=num_inputs,
        is_inner=not runs or runs[-1],
        is_dense=bool(order) and tensor.stride(order[-1]) == 1,
        num_dimensions=len(runs),
        element_bytes=tensor.element_size(),
        accumulator_bytes=accumulator,
        num_processors=hardware.num_processors,
        threads_per_processor=hardware.threads_per_processor,
    )
    return [size for size in sizes if size]


def _embedding_backward(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    gradient, indices, num_weights, padding_index = args[:4]
    number, width = indices.numel(), gradient.shape[-1]
    if number <= FEW_INDICES and padding_index < 0:
        return []
    segments = min(number, num_weights)
    partials = number // ROWS_PER_THREAD + segments
    sort = 8 * number  # indices, their order, both once more while they are sorted, and where segments begin
    return [sort, sort, sort, sort, sort, 8 * partials, 4 * partials * (-(-width // 32) * 32)]


def _converted(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """A scan over another dtype than it gives converts its input first."""
    tensor: Tensor = args[0]
    wanted = kwargs.get("dtype") or (tensor.dtype if tensor.is_floating_point() else torch.int64)
    return [] if wanted is tensor.dtype else [tensor.numel() * wanted.itemsize]


def _exponentials(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """logsumexp is made of ops that are not dispatched: x − max(x), its exponentials in place, their sum."""
    tensor: Tensor = args[0]
    return [tensor.numel() * tensor.element_size()]


def _attention(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    return attention.workspace_bytes(func, args[1], args[2])


def _products(func: Any, args: Any, kwargs: Any, hardware: Hardware) -> list[int]:
    """Copies of matrices that lie in memory as the library cannot read them."""
    matrices = [value for value in args if isinstance(value, Tensor)][-2:]
    return [matrix.numel() * matrix.element_size() for matrix in matrices if not _is_readable(matrix)]


def _is_readable(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    return bool((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)))


GEMMS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_RULES: dict[Any, Callable[[Any, Any, Any, Hardware], list[int]]] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _reduction),
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default), _reduction),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default), _converted),
    **dict.fromkeys(GEMMS, _products),
    aten.logsumexp.default: _exponentials,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _attention,
    aten._scaled_dot_product_flash_attention_backward.default: _attention,
    aten._scaled_dot_product_efficient_attention_backward.default: _attention,
}
