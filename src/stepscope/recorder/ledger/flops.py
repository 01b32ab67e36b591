"""FLOPs of one op from its shapes: torch's own formulas, and the few it lacks.

Conventions (docs/measurement.md): a multiply-add is 2 FLOPs. Causal attention counts half of its scores. The *model*
FLOPs of attention's backward are twice its forward: recomputed scores are hardware FLOPs only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from stepscope.recorder.ledger.storages import tensors_in
from stepscope.recorder.machine.environment import float32_matmul

_DTYPES = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}


def _attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of (batch, heads, length, width) attention. Keys may have fewer heads."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (width + value.shape[3]))


def _attention_backward(_grad_out: Any, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of the recomputed scores and of the gradients of both products."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[3]))


def _grouped_product(rows: Any, weights: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of one product per group: groups split the rows, or the inner dimension."""
    if rows.dim() == 3 and weights.dim() == 3:
        return int(2 * rows.shape[0] * rows.shape[1] * rows.shape[2] * weights.shape[2])
    return int(2 * rows.shape[-2] * rows.shape[-1] * weights.shape[-1])


# Formulas where torch counts nothing (attention on a CPU, grouped products) or where older versions fail on keys with
# fewer heads than queries.
_FORMULAS: dict[str, Callable[..., int]] = {
    f"aten._scaled_dot_product_{kind}": formula
    for backend in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for kind, formula in ((backend, _attention), (f"{backend}_backward", _attention_backward))
} | {"aten._grouped_mm": _grouped_product}


@dataclass(frozen=True)
class OpFlops:
    """FLOPs that one op call executes, how many of them the model needs, and their dtype."""

    flops: int
    model_flops: int
    dtype: str


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> OpFlops | None:
    """Return the FLOPs of an op call, or None if the op has no formula."""
    name = op_name(func)
    packet = getattr(func, "_overloadpacket", func)
    if name in _FORMULAS:
        flops = _FORMULAS[name](*args, **kwargs)
    elif packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
    else:
        return None
    model_flops = flops
    if "attention" in name:
        if "backward" in name:
            # Its arguments are (grad_out, query, key, value, …). Three of its five products are as wide as the
            # queries, the first of them the recomputed scores, and two are as wide as the values.
            width, value_width = args[1].shape[-1], args[3].shape[-1]
            model_flops = int(flops * (2 * width + 2 * value_width) // (3 * width + 2 * value_width))
        if _argument(func, args, kwargs, ("is_causal", "custom_mask_type")):
            flops, model_flops = flops // 2, model_flops // 2
    return OpFlops(flops, model_flops, _dtype(func, args, kwargs))


def has_formula(func: Any) -> bool:
    """Return whether `count_flops` can count an op."""
    return getattr(func, "_overloadpacket", func) in flop_registry or op_name(func) in _FORMULAS


def op_name(func: Any) -> str:
    """Return the op's name without its overload: `aten.mm`."""
    packet = getattr(func, "_overloadpacket", None)
    return str(packet) if packet is not None else str(func)


def _argument(func: Any, args: Any, kwargs: Any, names: tuple[str, ...]) -> Any:
    """Return the value of the first argument with one of these names, or None if the op has none."""
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in names:
            return args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
    return None


def _dtype(func: Any, args: Any, kwargs: Any) -> str:
    tensors = list(tensors_in((args, kwargs)))
    # The operands decide, not a wider bias or output; or the op has an argument for it.
    operand = next((t for t in tensors if t.dim() >= 2), tensors[0])
    dtype = _argument(func, args, kwargs, ("product_dtype",)) or operand.dtype
    if dtype == torch.float32:
        return float32_matmul(operand.device.index or 0) if operand.is_cuda else "fp32"
    if "float8" in str(dtype):
        return "fp8"
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))
