"""Sizes of the tensors that GPU work reads and writes."""

from collections.abc import Sequence
from math import prod

import polars as pl

from stepscope.analysis.costs.op_calls import Operand, Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, op_costs, operands
from stepscope.analysis.structure.names import with_answers

PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::addmm_": 1, "aten::baddbmm_": 1,
    "aten::_addmm_activation": 1, "aten::_scaled_mm": 0,
}  # fmt: skip
"""Ops that multiply two matrices, with the position of the left operand; the right one follows."""
_BYTES = ("read_bytes", "written_bytes")


def with_sizes(work: pl.DataFrame) -> pl.DataFrame:
    """Return rows with `shape` (the op's largest operand, or result of a product), `read_bytes` and `written_bytes`.

    The bytes stand at a call's longest event. Null if the trace does not contain shapes.
    """
    costs = op_costs(work.select(pl.col("op").alias("name"), *COLUMNS[1:]))
    sized = with_answers(work, ["op", "shapes", "dtypes"], _largest, {"shape": pl.List(pl.Int64())})
    is_longest = pl.col("bytes").is_not_null()
    return sized.with_columns(pl.when(is_longest).then(costs[name]).alias(name) for name in _BYTES)


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


def _largest(op: str | None, shapes: str | None, dtypes: str | None) -> tuple[list[int] | None]:
    given = operands(shapes, dtypes)
    known = [one.shape for one in given if isinstance(one, Tensor)]
    if sizes := product(op, given):
        batch, rows, _, columns = sizes
        known.append((batch, rows, columns))
    largest = max(known, key=prod, default=None)
    return (None if largest is None or prod(largest) >= 2**62 else list(largest),)
