"""Sizes of the tensors that GPU work reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from stepscope.analysis.costs.op_calls import Operand, Tensor
from stepscope.analysis.costs.op_costs import op_costs, operands

PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::addmm_": 1, "aten::baddbmm_": 1,
    "aten::_addmm_activation": 1, "aten::_scaled_mm": 0,
}  # fmt: skip
"""Ops that multiply two matrices, with the position of the left operand; the right one follows."""
_TEXTS = ("shapes", "dtypes", "strides", "inputs")


def with_sizes(work: pl.DataFrame) -> pl.DataFrame:
    """Return rows with `shape` (the op's largest operand, or result of a product), `read_bytes` and `written_bytes`.

    The bytes stand at a call's longest event. Null if the trace does not contain shapes.
    """
    keys = ["op", *_TEXTS]
    distinct = work.select(keys).unique(maintain_order=True)
    texts = distinct.with_columns(pl.all().cast(pl.String))
    costs = op_costs(texts.rename({"op": "name"}))
    shapes = [_largest(op, operands(sizes, dtypes)) for op, sizes, dtypes in texts.select(keys[:3]).iter_rows()]
    known = distinct.with_columns(
        pl.Series("shape", shapes, pl.List(pl.Int64)), costs["read_bytes"], costs["written_bytes"]
    )
    sized = work.join(known, on=keys, how="left", nulls_equal=True, maintain_order="left")
    is_longest = pl.col("bytes").is_not_null()
    return sized.with_columns(pl.when(is_longest).then(pl.col("read_bytes", "written_bytes")))


def product(op: str | None, given: Sequence[Operand]) -> tuple[int, int, int, int] | None:
    """Return batch, rows, inner size and columns of a product of two matrices; None for other ops.

    >>> product("aten::mm", operands("[[8, 16], [16, 4]]", '["float", "float"]'))
    (1, 8, 16, 4)
    """
    place = PRODUCTS.get(op or "")
    if place is None or len(given) < place + 2:
        return None
    left, right = given[place : place + 2]
    if not (isinstance(left, Tensor) and isinstance(right, Tensor) and 2 <= len(left.shape) == len(right.shape) <= 3):
        return None
    batch = left.shape[0] if len(left.shape) == 3 else 1
    return batch, left.shape[-2], left.shape[-1], right.shape[-1]


def _largest(op: str | None, given: Sequence[Operand]) -> list[int] | None:
    tensors = [one for one in given if isinstance(one, Tensor)]
    shapes = [one.shape for one in tensors]
    sizes = product(op, given)
    if sizes is not None:
        batch, rows, _, columns = sizes
        shapes.append((batch, rows, columns))
    if not shapes:
        return None
    largest = max(shapes, key=lambda shape: Tensor(shape, None).num_elements)
    return list(largest) if Tensor(largest, None).num_elements < 2**62 else None
