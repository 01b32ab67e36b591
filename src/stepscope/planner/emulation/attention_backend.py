"""Which kernel attention uses on a device, and the memory of that kernel.

For `scaled_dot_product_attention`, it follows PyTorch's rules: what each backend supports, and the order in which
they are tried. Forced, disabled and ordered backends (`sdpa_kernel`, `torch.backends.cuda.enable_…_sdp`) count.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.recorder.precision.attention_calls import SWITCHES

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
ORDER = ("flash", "efficient", "math", "cudnn")  # PyTorch's default order of preference
LARGEST_CAPABILITY = (12, 1)
MOST_CUDNN_ROWS = 65535


def kernel(compute_capability: tuple[int, int] | None) -> Callable[..., Tensor]:
    """Return a kernel for `aten::scaled_dot_product_attention` as on such a CUDA device, or on a CPU if None."""

    def attend(
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
        tensors = (query, key, value)
        # A compiler traces with host tensors, whatever device it compiles for.
        is_hosts = query.device.type == "cpu" and not torch.compiler.is_compiling()
        if compute_capability is None or is_hosts:
            name = "cpu" if _can_use_cpu(*tensors, attn_mask, dropout_p, enable_gqa) else "math"
        else:
            name = choose(*tensors, attn_mask, is_causal, enable_gqa, compute_capability, dropout_p)
        if attn_mask is not None and attn_mask.dtype is torch.bool and name != "math":
            # The value to add to the scores.
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(attn_mask.logical_not(), -math.inf)
        common = (dropout_p, is_causal)
        if name == "cpu":
            op = aten._scaled_dot_product_flash_attention_for_cpu
            return op(*tensors, *common, attn_mask=attn_mask, scale=scale)[0]
        if name == "flash":
            width = query.shape[-1]
            rest = -width % 8
            padded = [functional.pad(tensor, (0, rest)) if rest else tensor for tensor in tensors]
            scale = width**-0.5 if scale is None else scale
            out = aten._scaled_dot_product_flash_attention(*padded, *common, False, scale=scale)[0]
            return out[..., :width] if rest else out
        if name == "efficient":
            mask = None if attn_mask is None else _aligned(attn_mask, query, key)
            op = aten._scaled_dot_product_efficient_attention
            return op(*tensors, mask, _needs_gradient(*tensors), *common, scale=scale)[0]
        if name == "cudnn":
            op = aten._scaled_dot_product_cudnn_attention
            return op(*tensors, attn_mask, _needs_gradient(*tensors), *common, False, scale=scale)[0]
        op = aten._scaled_dot_product_attention_math
        return op(*tensors, attn_mask, *common, None, scale=scale, enable_gqa=enable_gqa)[0]

    return attend


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    compute_capability: tuple[int, int],
    dropout_p: float = 0.0,
) -> str:
    """Return `cudnn`, `flash`, `efficient` or `math`."""
    tensors = (query, key, value)
    capability, dropout = compute_capability, dropout_p if _needs_gradient(*tensors) else None
    is_fusible = _is_fusible(*tensors, enable_gqa) and capability <= LARGEST_CAPABILITY
    is_dense = all(tensor.stride(-1) == 1 for tensor in tensors)
    is_mask_dense = mask is None or mask.stride(-1) == 1
    is_low = query.dtype in HALF and capability >= (8, 0) and (is_dense or query.shape[-1] == 1)
    possible: dict[str, Callable[[], bool]] = {
        "cudnn": lambda: is_low and is_mask_dense and _can_use_cudnn(*tensors, mask, dropout_p, capability),
        "flash": lambda: is_low and mask is None and _can_use_flash(*tensors, is_causal, dropout, capability),
        "efficient": lambda: is_dense and is_mask_dense and _can_use_efficient(*tensors, capability),
        "math": lambda: True,
    }
    for name in _order(capability):
        is_allowed = getattr(torch.backends.cuda, f"{SWITCHES[name]}_enabled")()
        if is_allowed and (name == "math" or is_fusible) and possible[name]():
            return name
    raise RuntimeError("No available kernel. Aborting execution.")  # PyTorch's own message


def _order(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    asked: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    order = tuple(BACKENDS[number] for number in asked if number in BACKENDS) or ORDER
    # Where cuDNN is fastest, PyTorch tries it first unless the program changed the order.
    if order == ORDER and compute_capability[0] in (9, 10) and compute_capability[1] in (0, 3):
        return ("cudnn", "flash", "efficient", "math")
    return order


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_fusible(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Return whether shapes and dtypes suit every fused kernel."""
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or tensor.dtype is not query.dtype or not tensor.shape[2] for tensor in tensors):
        return False
    (batch, heads), shared = query.shape[:2], key.shape[1]
    if key.shape[0] != batch or value.shape[:2] != key.shape[:2]:
        return False
    return heads == shared or (enable_gqa and heads % shared == 0)


def _can_use_flash(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout_p: float | None, capability: tuple[int, int]
) -> bool:
    """`dropout_p` is None if no gradient is needed."""
    width = query.shape[-1]
    if width > 256 or not width == key.shape[-1] == value.shape[-1]:
        return False
    if is_causal and query.shape[2] != key.shape[2]:
        return False
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)  # little shared memory for backward
    return dropout_p is None or not is_small or width <= 192 or (width > 224 and dropout_p == 0)


def _can_use_efficient(query: Tensor, key: Tensor, value: Tensor, capability: tuple[int, int]) -> bool:
    is_half = query.dtype in HALF
    if not (is_half or query.dtype is torch.float32) or (query.dtype is torch.bfloat16 and capability < (8, 0)):
        return False
    multiple = (8 if is_half else 4) if capability >= (8, 0) else 8 if is_half and capability >= (7, 0) else 1
    (_, heads, _, width), (_, key_heads, _, key_width) = query.shape, key.shape
    is_same = heads == key_heads and width == key_width
    return bool(is_same and width % multiple == 0 and value.shape[-1] % multiple == 0)


def _can_use_cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, capability: tuple[int, int]
) -> bool:
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if mask is not None and not _is_plain_mask(mask, query, key):
        return False
    if max(query.shape[:2]) > MOST_CUDNN_ROWS or key.shape[2] == 1:
        return False
    if dropout_p and (query.shape[2] == 1 or dropout_p * 16 != math.floor(dropout_p * 16)):
        return False
    width, value_width = query.shape[-1], value.shape[-1]
    most = 256 if capability == (9, 0) else 128
    is_latent = (width, value_width) == (192, 128) and capability[0] in (9, 10)
    return width % 8 == 0 and value_width % 8 == 0 and (max(width, value_width) <= most or is_latent)


def _can_use_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> bool:
    """Return whether a CPU has a fused kernel for these arguments."""
    tensors = (query, key, value)
    return bool(
        torch.backends.cuda.flash_sdp_enabled()
        and _is_fusible(*tensors, enable_gqa)
        and query.is_floating_point()
        and dropout_p == 0
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and (mask is None or _is_plain_mask(mask, query, key))
    )


def _is_plain_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Return whether a mask needs no gradient and has a shape that cuDNN and CPUs support."""
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])[-mask.dim() :]
    return all(size in (1, wanted) for size, wanted in zip(mask.shape, full))


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask for every head, with rows padded in memory to 16 elements."""
    rest = -mask.shape[-1] % 16
    if rest:
        mask = functional.pad(mask, (0, rest))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def workspace_bytes(func: Any, query: Tensor, key: Tensor, num_processors: int) -> list[list[int]]:
    """Return groups of scratch sizes that the backward of an attention op allocates together."""
    batch, heads, length, width = query.shape
    rows = batch * heads * length
    # Gradients of keys and values shared by several heads are computed per head and then summed.
    shared = [] if key.shape[1] == heads else [query.element_size() * batch * heads * key.shape[2] * width] * 2
    if func is aten._scaled_dot_product_cudnn_attention_backward.default:
        # Gradients of queries are summed in float32, plus one row sum each.
        return [[4 * rows * width + 4 * rows + 16, *shared]]
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        padded = -(-length // 128) * 128
        wide = width if width <= 32 else -(-width // 32) * 32
        # In deterministic mode, groups of processors sum gradients of queries separately.
        parts = -(-num_processors // (batch * heads)) if torch.are_deterministic_algorithms_enabled() else 1
        return [[4 * batch * heads * padded, 4 * batch * padded * heads * wide * parts, *shared]]
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        product = query.element_size() * rows * width  # output times its gradient, before the row sums
        wide = -(-width // 64) * 64 if width <= 64 or width > 128 else 128
        return [[4 * rows, product, 4 * rows], [4 * rows, 4 * rows * wide + 256 * batch * heads]]
    return []


# --- flex_attention: planned with the memory of the kernel that it compiles to ---

FLEX_NOTE = "planned as the fused kernel that it compiles to; the kernel's scratch memory and FLOPs are not counted"


def flex_patches(note: Callable[[str], None]) -> Iterator[Any]:
    """Yield patches of the op behind `flex_attention` that call `note` when it is used."""
    from torch.nn.attention import flex_attention

    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        note(FLEX_NOTE)
        out, sums = _FlexAttention.apply(query, key, value)
        return out, sums, torch.empty_like(sums)

    yield mock.patch.object(flex_attention, "flex_attention_hop", attend)
    # Skips its own call of torch.compile.
    yield mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, create=True)


class _FlexAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not type checked here
    """Returns outputs of the right size, and keeps one float32 row sum per query for backward."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        out = torch.empty_like(query) if query.shape == value.shape else _rows(query, value.shape[-1], query.dtype)
        sums = _rows(query, None, torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _rows(query: torch.Tensor, width: int | None, dtype: torch.dtype) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], *(() if width is None else (width,))), dtype=dtype)
