"""Which back end `scaled_dot_product_attention` takes on a CUDA device, and the op that then runs.

The rules are those of PyTorch: what each back end can do, in the order in which they are asked. Forced or forbidden
back ends (`sdpa_kernel`, `torch.backends.cuda.enable_…_sdp`) are obeyed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def on_cuda(compute_capability: tuple[int, int]) -> Callable[..., Tensor]:
    """A kernel for `aten::scaled_dot_product_attention` as a device of this compute capability would run it."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        name = choose(query, key, value, attn_mask, is_causal, enable_gqa, compute_capability)
        if attn_mask is not None and attn_mask.dtype is torch.bool and name != "math":
            attn_mask = _additive(attn_mask, query.dtype)
        needs_graph = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if name == "flash":
            width = query.shape[-1]
            query, key, value = (_padded(tensor, 8) for tensor in (query, key, value))
            scale = width**-0.5 if scale is None else scale
            out = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )
            return out[0] if out[0].shape[-1] == width else out[0][..., :width]
        if name == "efficient":
            mask = None if attn_mask is None else _aligned(attn_mask, query, key)
            found = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_graph, dropout_p, is_causal, scale=scale
            )
            return found[0]
        if name == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, needs_graph, dropout_p, is_causal, False, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return kernel


def on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A kernel for `aten::scaled_dot_product_attention` as a CPU would run it."""
    is_plain = query.dim() == 4 and query.shape[-1] == value.shape[-1] and dropout_p == 0
    if is_plain and (attn_mask is None or not attn_mask.requires_grad):
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = _additive(attn_mask, query.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    compute_capability: tuple[int, int],
) -> str:
    """`cudnn`, `flash`, `efficient` or `math`."""
    backends: Any = torch.backends.cuda
    width, is_grouped = query.shape[-1], enable_gqa and query.shape[-3] != key.shape[-3]
    is_plain = query.dim() == 4 and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    same_width = width == value.shape[-1] == key.shape[-1]
    possible: dict[str, bool] = {
        "cudnn": query.dtype in HALF
        and compute_capability >= (8, 0)
        and width % 8 == 0
        and width <= 128
        and value.shape[-1] % 8 == 0
        and not (mask is not None and is_causal),
        "flash": query.dtype in HALF
        and compute_capability >= (8, 0)
        and mask is None
        and width <= 256
        and same_width,
        "efficient": not is_grouped
        and (query.dtype in HALF or query.dtype is torch.float32)
        and width % (8 if query.dtype in HALF else 4) == 0
        and not (mask is not None and mask.requires_grad),
    }
    allowed = {
        "cudnn": backends.cudnn_sdp_enabled(),
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
    }
    # cuDNN is asked first where it is the fastest: compute capability 9.0 and 10.0.
    first: tuple[str, ...] = ("cudnn",) if compute_capability in ((9, 0), (10, 0)) else ()
    for name in (*first, "flash", "efficient", "cudnn"):
        if is_plain and allowed[name] and possible[name]:
            return name
    return "math"


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of booleans as what is added to the scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    rest = -tensor.shape[-1] % multiple
    return functional.pad(tensor, (0, rest)) if rest else tensor


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask for every head, its rows padded in memory to 16 elements."""
    rest = -mask.shape[-1] % 16
    if rest:
        mask = functional.pad(mask, (0, rest))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def workspace_bytes(func: Any, query: Tensor, key: Tensor) -> list[int]:
    """What an attention op of a CUDA device takes and gives back inside its kernel calls."""
    batch, heads, length, width = query.shape
    rows = batch * heads * length
    if func is aten._scaled_dot_product_cudnn_attention_backward.default:
        # Gradients of queries are summed in float32, besides a row sum each.
        return [4 * rows * width + 4 * rows + 16]
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        padded = -(-length // 128) * 128
        wide = width if width <= 32 else -(-width // 32) * 32
        expanded = [] if key.shape[1] == heads else [2 * batch * heads * key.shape[2] * width] * 2
        return [4 * batch * heads * padded, 4 * batch * padded * heads * wide, *expanded]
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        product = query.element_size() * rows * width
        return [4 * rows, product, 4 * rows, 4 * rows * width + 256 * batch * heads]
    return []
