"""FLOPs of one op from its shapes: torch's own formulas, the few it lacks, and the two conventions.

Conventions (docs/measurement.md): a multiply-add is 2 FLOPs. Causal attention counts half of its
square. The *model's* attention backward is twice its forward; that a fused kernel computes the
scores again is hardware FLOPs, not the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from stepscope.recorder.environment import float32_matmul
from stepscope.recorder.ledger.storages import tensors_in

_DTYPES = {
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
}


def _attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    """Scores and their product with the values: (batch, heads, length, width); keys may have fewer heads."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (width + value.shape[3]))


def _attention_backward(_grad_out: Any, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    """The scores again, and the gradients of both products."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[3]))


def _grouped_product(rows: Any, weights: Any, *_args: Any, **_kwargs: Any) -> int:
    """One product a group: every row meets one group's matrix, or groups are stretches of the inner dimension."""
    if rows.dim() == 3 and weights.dim() == 3:
        return int(2 * rows.shape[0] * rows.shape[1] * rows.shape[2] * weights.shape[2])
    return int(2 * rows.shape[-2] * rows.shape[-1] * weights.shape[-1])


# Our own formulas where torch's count nothing (attention on a CPU, grouped products) or, in older releases, refuse
# keys with fewer heads than queries.
_FORMULAS: dict[str, Callable[..., int]] = {
    f"aten._scaled_dot_product_{kind}": formula
    for backend in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for kind, formula in ((backend, _attention), (f"{backend}_backward", _attention_backward))
} | {"aten._grouped_mm": _grouped_product}


@dataclass(frozen=True)
class OpFlops:
    """FLOPs one op call executes, FLOPs of it that the model asks for, and the dtype they are done in."""

    flops: int
    model_flops: int
    dtype: str


class FlopCount:
    """Callable: `count_flops(func, args, kwargs, out)`; None when the op has no formula."""

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> OpFlops | None:
        name = self.name(func)
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
                model_flops = _without_scores_again(flops, args)
            if _is_causal(func, args, kwargs):
                flops, model_flops = flops // 2, model_flops // 2
        return OpFlops(flops, model_flops, _dtype(func, args, kwargs))

    def has_no_formula(self, func: Any) -> bool:
        """Whether an op should be looked into, in case it is made of ops that have formulas."""
        return getattr(func, "_overloadpacket", func) not in flop_registry and self.name(func) not in _FORMULAS

    @staticmethod
    def name(func: Any) -> str:
        """The op's name without its overload: `aten.mm`."""
        packet = getattr(func, "_overloadpacket", None)
        return str(packet) if packet is not None else str(func)


count_flops = FlopCount()


def _without_scores_again(flops: int, args: Any) -> int:
    # An attention backward is (grad_out, query, key, value, …): of its five products three are as wide
    # as the queries, the first of them the scores again, and two as wide as the values.
    width, value_width = args[1].shape[-1], args[3].shape[-1]
    return int(flops * (2 * width + 2 * value_width) // (3 * width + 2 * value_width))


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(_argument(func, args, kwargs, ("is_causal", "custom_mask_type")))


def _argument(func: Any, args: Any, kwargs: Any, names: tuple[str, ...]) -> Any:
    """What an op was given for the first of its arguments that has one of the names; None where it has none."""
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in names:
            return args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
    return None


def _dtype(func: Any, args: Any, kwargs: Any) -> str:
    tensors = list(tensors_in((args, kwargs)))
    # The operands decide, not a bias or an output that may be wider; or the op says in what it multiplies.
    operand = next((t for t in tensors if t.dim() >= 2), tensors[0])
    dtype = _argument(func, args, kwargs, ("product_dtype",)) or operand.dtype
    if dtype == torch.float32:
        return float32_matmul(operand.device.index or 0) if operand.is_cuda else "fp32"
    if "float8" in str(dtype):
        return "fp8"
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))
