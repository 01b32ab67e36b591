"""Attention on the GPU: backend, mask and FLOPs of each call, and the work of attention written by hand."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.matmul_formulas import LENGTH_BEFORE_HEADS
from stepscope.analysis.costs.op_calls import Operand, Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, argument_place, argument_values, operands
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.work import product

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
    rows, given = [], linked.host.select(COLUMNS)
    for key, part in (("call", fused), ("root", work.filter(is_math))):
        calls = part.group_by(key, maintain_order=True).agg(
            pl.col("event"),
            pl.col("duration_ns").sum(),
            pl.col("phase", "module").cast(pl.String).first(),
            pl.col("root").alias("dispatcher").first(),
        )
        for call, events, duration_ns, phase, module, dispatcher in calls.iter_rows():
            called = _causal_and_dense(None if dispatcher is None else given.row(dispatcher))
            rows.append((call, phase, module, *_facts(*given.row(call)[:3]), *called, duration_ns, events))
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


def _causal_and_dense(texts: tuple[Any, ...] | None) -> tuple[bool | None, bool | None]:
    """Return `is_causal` and `is_dense` as the program called the op, from the texts of its `COLUMNS`."""
    if texts is None or texts[0] != DISPATCHER:
        return None, None
    name, shapes, dtypes, strides, inputs = texts
    values = argument_values(inputs)
    is_causal = None if values is None or len(values) < 6 else values[5] == "True"
    return is_causal, is_dense(name, operands(shapes, dtypes, strides))


LEAST_KEYS = 64
_SOFTMAX = ("aten::_softmax", "aten::exp", "aten::exp_")
_MASKING = ("aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::tril", "aten::tril_")
_ADDING = ("aten::add", "aten::add_", "aten::baddbmm", "aten::baddbmm_")
_HANDWRITTEN = {
    "num_elements": pl.Int64(), "num_queries": pl.Int64(), "num_keys": pl.Int64(), "head_size": pl.Int64(),
    "event": pl.Int64(), "op": pl.String(), "phase": pl.String(), "duration_ns": pl.Int64(),
    "flops": pl.Int64(), "peak_dtype": pl.String(), "is_mask": pl.Boolean(), "is_softmax": pl.Boolean(),
}  # fmt: skip


def handwritten_attention(sized: pl.DataFrame) -> pl.DataFrame:
    """Return the GPU work of handwritten attention, one row per event, from work with sizes (`with_sizes`).

    It is found where a product creates a queries × keys tensor, a softmax or exponential reads it, and another
    product takes the result; all work on tensors of that shape belongs to it, and copies that only lay out the
    products' other operands. `flops` and `peak_dtype` are those of products, else null. `is_mask` marks ops that
    apply a mask.
    """
    names = ("event", "op", "root_op", "phase", "duration_ns", "flops", "peak_dtype", "shape", "shapes", "dtypes")
    read = sized.sort("start_ns", "event").select(names).with_columns(pl.col(pl.Categorical).cast(pl.String))
    rows = [
        row
        for row in read.iter_rows(named=True)
        if row["shape"] and row["root_op"] != DISPATCHER and row["phase"] != "optimizer"
    ]
    found: list[dict[str, Any]] = []
    for (num_elements, queries, keys), head_size in _attentions(rows).items():
        sizes = {"num_elements": num_elements, "num_queries": queries, "num_keys": keys, "head_size": head_size}
        for row in rows:
            shape = row["shape"]
            if prod(shape) != num_elements or len(shape) < 3 or sorted(shape[-2:]) != sorted((queries, keys)):
                continue
            is_product = product(row["op"], operands(row["shapes"], None)) is not None
            marks = {"is_mask": _is_mask(row, num_elements, keys), "is_softmax": row["op"] in _SOFTMAX}
            found.append({**row, **sizes, **marks, **({} if is_product else {"flops": None, "peak_dtype": None})})
    return pl.DataFrame([*found, *_layout_copies(rows, found)], schema=_HANDWRITTEN)


def _layout_copies(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield copies of queries, keys, values, results or their gradients into another layout: products need them, but
    a fused attention reads and writes heads where they are.

    They lie between the same two other products as the attention.
    """
    own = {row["event"]: row for row in found}
    run: list[dict[str, Any]] = []
    for row in [*rows, None]:
        if row is not None and (row["event"] in own or product(row["op"], operands(row["shapes"], None)) is None):
            run.append(row)
            continue
        products = [own[each["event"]] for each in run if each["event"] in own and own[each["event"]]["flops"]]
        for each in run:
            of = next((one for one in products if _is_layout_copy(each, one)), None)
            if of is not None and each["event"] not in own:
                sizes = {name: of[name] for name in ("num_elements", "num_queries", "num_keys", "head_size")}
                marks = {"flops": None, "peak_dtype": None, "is_mask": False, "is_softmax": False}
                yield {**each, **sizes, **marks}
        run = []


def _is_layout_copy(row: dict[str, Any], of: dict[str, Any]) -> bool:
    """Return whether a copy keeps the dtype of a tensor of all heads × queries or keys × head size."""
    tensors = [one for one in operands(row["shapes"], row["dtypes"]) if isinstance(one, Tensor)]
    if row["op"] != "aten::copy_" or len(tensors) < 2 or tensors[0].dtype != tensors[1].dtype:
        return False
    num_heads = of["num_elements"] // (of["num_queries"] * of["num_keys"])
    shape = tensors[0].shape
    lengths = {of["num_queries"], of["num_keys"]} & {*shape}
    is_whole = any(tensors[0].num_elements == num_heads * length * of["head_size"] for length in lengths)
    return is_whole and len(shape) in (3, 4) and of["head_size"] in shape


def _attentions(rows: list[dict[str, Any]]) -> dict[tuple[int, int, int], int]:
    """Return elements, queries, keys and head size of each kind of score tensor."""
    soft = {
        (prod(row["shape"]), *row["shape"][-2:])
        for row in rows
        if row["op"] in _SOFTMAX and len(row["shape"]) >= 3 and min(row["shape"][-2:]) >= LEAST_KEYS
    }
    makes: dict[tuple[int, int, int], int] = {}
    takes = set()
    for row in rows:
        sizes = product(row["op"], operands(row["shapes"], None))
        if sizes is None:
            continue
        batch, num_rows, inner, columns = sizes
        if inner < columns:
            makes.setdefault((batch * num_rows * columns, num_rows, columns), inner)
        if columns < inner:
            takes.add((batch * num_rows * inner, num_rows, inner))
    return {key: head_size for key, head_size in makes.items() if key in soft & takes}


def _is_mask(row: dict[str, Any], num_elements: int, num_keys: int) -> bool:
    if row["op"] in _MASKING:
        return True
    tensors = [one for one in operands(row["shapes"], row["dtypes"]) if isinstance(one, Tensor)]
    # An added mask is shared by all heads.
    return row["op"] in _ADDING and any(
        len(one.shape) >= 2 and one.shape[-1] == num_keys and one.num_elements < num_elements for one in tensors[:2]
    )
