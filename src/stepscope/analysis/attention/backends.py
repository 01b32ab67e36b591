"""Scaled dot-product attention on the GPU: backend, mask and FLOPs of each call."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from stepscope.analysis.costs.matmul_formulas import LENGTH_BEFORE_HEADS
from stepscope.analysis.costs.op_calls import Operand, Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, argument_place, argument_values, operands
from stepscope.analysis.structure.links import Linked

DISPATCHER = "aten::scaled_dot_product_attention"  # the op that programs call
_SCHEMA = {
    "call": pl.UInt32(), "phase": pl.String(), "module": pl.String(), "direction": pl.String(),
    "backend": pl.String(), "dtype": pl.String(), "batch": pl.Int64(), "num_heads": pl.Int64(),
    "num_queries": pl.Int64(), "num_keys": pl.Int64(), "head_size": pl.Int64(), "mask": pl.String(),
    "full_flops": pl.Int64(), "is_causal": pl.Boolean(), "is_dense": pl.Boolean(), "duration_ns": pl.Int64(),
    "events": pl.List(pl.Int64()),
}  # fmt: skip


_FUSED = [
    "aten::_flash_attention_forward", "aten::_flash_attention_backward", "aten::_efficient_attention_forward",
    "aten::_efficient_attention_backward", "aten::_cudnn_attention_forward", "aten::_cudnn_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward",
]  # fmt: skip
_NUM_PRODUCTS = {"forward": 2, "backward": 5, "both": 7}  # the backward recomputes the first product


def attention_calls(linked: Linked, work: pl.DataFrame) -> pl.DataFrame:
    """Return attention calls by time, forward and backward separately.

    `call` is the op's row. `mask` is the mask's shape or null. `full_flops` ignores the saving of a causal mask.
    `is_dense` means that query, key and value have stride(-1) == 1; null if unknown, like `is_causal`. `events` is
    the GPU work. The math backend has many kernels: its `call` is the dispatching op, and its row includes the
    backward.
    """
    fused = work.filter(pl.col("op").cast(pl.String).is_in(_FUSED))
    is_math = (pl.col("root_op").cast(pl.String) == DISPATCHER) & ~pl.col("root").is_in(fused["root"].implode())
    rows = []
    for key, part in (("call", fused), ("root", work.filter(is_math))):
        calls = part.group_by(key, maintain_order=True).agg(
            pl.col("event"),
            pl.col("duration_ns").sum(),
            pl.col("phase", "module").cast(pl.String).first(),
            pl.col("root").alias("dispatcher").first(),
        )
        for call, events, duration_ns, phase, module, dispatcher in calls.iter_rows():
            texts = linked.host[call].select("name", "shapes", "dtypes").row(0)
            rows.append(
                (call, phase, module, *_facts(*texts), *_causal_and_dense(linked, dispatcher), duration_ns, events)
            )
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row").sort("call")


def _facts(name: str, shapes: str | None, dtypes: str | None) -> tuple[object, ...]:
    direction = "both" if name == DISPATCHER else "backward" if "backward" in name else "forward"
    tensors = operands(shapes, dtypes)
    query, key, _ = inputs_of(name, tensors)
    unknown = (direction, backend_of(name), *(None,) * 8)
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and len(query.shape) == len(key.shape) == 4):
        return unknown
    batch, head_size = query.shape[0], query.shape[3]
    sequence = 1 if name.removeprefix("aten::") in LENGTH_BEFORE_HEADS else 2
    num_queries, num_keys, num_heads = query.shape[sequence], key.shape[sequence], query.shape[3 - sequence]
    flops = 2 * _NUM_PRODUCTS[direction] * batch * num_heads * num_queries * num_keys * head_size
    if flops >= 2**63:  # not an attention op
        return unknown
    sizes = (batch, num_heads, num_queries, num_keys, head_size)
    return (direction, backend_of(name), query.dtype, *sizes, mask_shape(name, tensors), flops)


def backend_of(op: str) -> str:
    return next((name for name in ("flash", "efficient", "cudnn", "flex") if name in op), "math")


def inputs_of(op: str, tensors: Sequence[Operand]) -> list[Any]:
    """Return query, key and value among an op's operands, None if one is missing."""
    query = argument_place(op, "query") or 0
    return [at(tensors, query + place) for place in range(3)]


def at(items: Sequence[Any], place: int | None) -> Any:
    return items[place] if place is not None and place < len(items) else None


def mask_shape(op: str, tensors: Sequence[Operand]) -> str | None:
    """Return the shape of the mask among an op's operands, None without a mask."""
    mask = at(tensors, argument_place(op, "attn_mask", "attn_bias", "bias"))
    return str(list(mask.shape)) if isinstance(mask, Tensor) and mask.shape else None


def is_dense(op: str, tensors: Sequence[Operand]) -> bool | None:
    """Return whether query, key and value have stride(-1) == 1; None if unknown."""
    known = [one.strides for one in inputs_of(op, tensors) if isinstance(one, Tensor) and one.strides]
    return all(strides[-1] == 1 for strides in known) if known else None


def _causal_and_dense(linked: Linked, dispatcher: int | None) -> tuple[bool | None, bool | None]:
    """Return `is_causal` and `is_dense` as the program called the op."""
    if dispatcher is None:
        return None, None
    name, shapes, dtypes, strides, inputs = linked.host[dispatcher].select(COLUMNS).row(0)
    if name != DISPATCHER:
        return None, None
    values = argument_values(inputs)
    is_causal = None if values is None or len(values) < 6 else values[5] == "True"
    return is_causal, is_dense(name, operands(shapes, dtypes, strides))
