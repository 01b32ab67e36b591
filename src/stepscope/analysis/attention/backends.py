"""Scaled dot-product attention on the GPU: backend, mask and FLOPs of each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import polars as pl

from stepscope.analysis.costs.op_calls import Operand, Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, argument_values, operands
from stepscope.analysis.structure.links import Linked

BACKENDS = ("flash", "cudnn", "efficient", "math")
DISPATCHER = "aten::scaled_dot_product_attention"  # the op that programs call
_SCHEMA = {
    "call": pl.UInt32(), "phase": pl.String(), "module": pl.String(), "direction": pl.String(),
    "backend": pl.String(), "dtype": pl.String(), "batch": pl.Int64(), "num_heads": pl.Int64(),
    "num_queries": pl.Int64(), "num_keys": pl.Int64(), "head_size": pl.Int64(), "mask": pl.String(),
    "full_flops": pl.Int64(), "is_causal": pl.Boolean(), "is_dense": pl.Boolean(), "duration_ns": pl.Int64(),
    "events": pl.List(pl.Int64()),
}  # fmt: skip


class _Op(NamedTuple):
    backend: str
    direction: str
    query: int  # position of the query among the op's inputs; key and value follow
    mask: int | None
    sequence: int  # the query's sequence axis


_OPS = {
    "aten::_flash_attention_forward": _Op("flash", "forward", 0, None, 1),
    "aten::_flash_attention_backward": _Op("flash", "backward", 1, None, 1),
    "aten::_efficient_attention_forward": _Op("efficient", "forward", 0, 3, 1),
    "aten::_efficient_attention_backward": _Op("efficient", "backward", 1, 4, 1),
    "aten::_cudnn_attention_forward": _Op("cudnn", "forward", 0, 3, 2),
    "aten::_cudnn_attention_backward": _Op("cudnn", "backward", 1, 8, 2),
    "aten::_scaled_dot_product_cudnn_attention": _Op("cudnn", "forward", 0, 3, 2),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Op("cudnn", "backward", 1, 8, 2),
    DISPATCHER: _Op("math", "both", 0, 3, 2),
}


def attention_calls(linked: Linked, work: pl.DataFrame) -> pl.DataFrame:
    """Return attention calls by time, forward and backward separately.

    `call` is the op's row. `mask` is the mask's shape or null. `full_flops` ignores the saving of a causal mask.
    `is_dense` means that query, key and value have stride(-1) == 1; null if unknown, like `is_causal`. `events` is
    the GPU work. The math backend has many kernels: its `call` is the dispatching op, and its row includes the
    backward.
    """
    names = work["op"].cast(pl.String)
    fused = work.filter(names.is_in([name for name in _OPS if name != DISPATCHER]))
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
    op = _OPS.get(name, _OPS[DISPATCHER])
    tensors = operands(shapes, dtypes)
    query, key = at(tensors, op.query), at(tensors, op.query + 1)
    unknown = (op.direction, op.backend, *(None,) * 8)
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and len(query.shape) == len(key.shape) == 4):
        return unknown
    batch, head_size = query.shape[0], query.shape[3]
    num_queries, num_keys, num_heads = query.shape[op.sequence], key.shape[op.sequence], query.shape[3 - op.sequence]
    # Two matrix products in the forward, five in the backward, which recomputes the first.
    num_products = {"forward": 2, "backward": 5, "both": 7}[op.direction]
    flops = 2 * num_products * batch * num_heads * num_queries * num_keys * head_size
    if flops >= 2**63:  # not an attention op
        return unknown
    sizes = (batch, num_heads, num_queries, num_keys, head_size)
    return (op.direction, op.backend, query.dtype, *sizes, mask_shape(tensors, op.mask), flops)


def at(items: Sequence[Any], place: int | None) -> Any:
    """Return an item by its position, None if there is none."""
    return items[place] if place is not None and place < len(items) else None


def mask_shape(tensors: Sequence[Operand], place: int | None) -> str | None:
    """Return the shape of the mask at a position, None without a mask."""
    mask = at(tensors, place)
    return str(list(mask.shape)) if isinstance(mask, Tensor) and mask.shape else None


def is_dense(tensors: Sequence[Operand], query: int) -> bool | None:
    """Return whether query, key and value have stride(-1) == 1; None if unknown."""
    known = [one.strides for one in tensors[query : query + 3] if isinstance(one, Tensor) and one.strides]
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
    return is_causal, is_dense(operands(shapes, dtypes, strides), 0)
