"""Handwritten attention: products, softmax and masks over queries × keys tensors, forward and backward."""

from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.attention.backends import DISPATCHER
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.tensor_sizes import product

LEAST_KEYS = 64
_SOFTMAX = ("aten::_softmax", "aten::exp", "aten::exp_")
_MASKING = ("aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::tril", "aten::tril_")
_ADDING = ("aten::add", "aten::add_", "aten::baddbmm", "aten::baddbmm_")
_SCHEMA = {
    "num_elements": pl.Int64(), "num_queries": pl.Int64(), "num_keys": pl.Int64(), "head_size": pl.Int64(),
    "event": pl.Int64(), "op": pl.String(), "phase": pl.String(), "duration_ns": pl.Int64(),
    "flops": pl.Int64(), "peak_dtype": pl.String(), "is_mask": pl.Boolean(), "is_softmax": pl.Boolean(),
}  # fmt: skip


def handwritten_attention(sized: pl.DataFrame) -> pl.DataFrame:
    """Return the GPU work of handwritten attention, one row per event, from work with sizes (`with_sizes`).

    It is found where a product creates a queries × keys tensor, a softmax or exponential reads it, and another
    product takes the result; all work on tensors of that shape belongs to it. `flops` and `peak_dtype` are those of
    products, else null. `is_mask` marks ops that apply a mask.
    """
    rows = [
        row
        for row in sized.with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True)
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
    return pl.DataFrame(found, schema=_SCHEMA)


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
