"""Matrix products of the typical steps, with the properties that determine their speed."""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import ITEM_BYTES, Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.errors import Unavailable
from stepscope.session.case import Case

LOADED_BYTES = 16  # tensor cores load operands in units of this
_WITH_SUMMAND = ("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::_addmm_activation")
_SCHEMA = pl.Schema(
    {
        "op": pl.String(), "shapes": pl.String(), "module": pl.String(), "phase": pl.String(), "dtype": pl.String(),
        "peak_dtype": pl.String(), "flops": pl.Int64(), "bytes": pl.Int64(), "duration_ns": pl.Int64(),
        "kernel": pl.String(), "alignment_bytes": pl.Int64(), "odd_sizes": pl.List(pl.Int64()),
        "events": pl.List(pl.Int64()),
    }
)  # fmt: skip


def gemm_calls(case: Case) -> pl.DataFrame:
    """Return matrix products outside attention whose FLOPs are known, one row per call.

    `kernel` is the longest one, `alignment_bytes` the largest power of two (up to 128) that divides all dimensions,
    `odd_sizes` the dimensions that are not a multiple of `LOADED_BYTES`. Raises Unavailable without shapes.
    """
    case.with_shapes()
    gemms = case.work.filter(pl.col("class").is_in(["gemm", "convolution"]), pl.col("call").is_not_null())
    if gemms.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    calls = gemms.group_by("call", maintain_order=True).agg(
        pl.col("op", "shapes", "module", "phase").first().cast(pl.String),
        pl.col("dtype", "peak_dtype", "flops", "bytes").drop_nulls().first(),
        pl.col("duration_ns").sum(),
        pl.col("name").sort_by("duration_ns").last().cast(pl.String).alias("kernel"),
        pl.col("dtypes").first(),
        pl.col("event").alias("events"),
    )
    calls = calls.filter(pl.col("flops") > 0)
    if calls.is_empty():
        raise Unavailable("The trace does not contain the shapes of its matrix products.")
    found = [_alignment(*texts) for texts in calls.select("op", "shapes", "dtypes").iter_rows()]
    return calls.with_columns(
        pl.Series("alignment_bytes", [alignment for alignment, _ in found], pl.Int64),
        pl.Series("odd_sizes", [sizes for _, sizes in found], pl.List(pl.Int64)),
    ).select(_SCHEMA.names())


def by_shape(case: Case, calls: pl.DataFrame) -> list[dict[str, Any]]:
    """Return rows of evidence per step by op and shapes, the longest first."""
    keys = ("op", "shapes", "dtype", "kernel")
    rate = (pl.col("flops").sum() * 1e9 / pl.col("duration_ns").sum()).alias("flops_per_s")
    table = case.grouped(calls, "num_calls", *keys, more=[rate])
    return table.select(*keys, "num_calls", "duration_ns", "flops_per_s").head(8).to_dicts()


def _alignment(op: str, shapes: str | None, dtypes: str | None) -> tuple[int, list[int]]:
    """Return `alignment_bytes` and `odd_sizes` of both matrices' last two dimensions; convolutions are aligned."""
    first = 1 if op in _WITH_SUMMAND else 0
    tensors = operands(shapes, dtypes)[first : first + 2] if "conv" not in op else ()
    best, odd = 128, set()
    for matrix in tensors:
        if not isinstance(matrix, Tensor) or len(matrix.shape) < 2:
            continue
        item = ITEM_BYTES.get(matrix.dtype or "", 4)
        for size in matrix.shape[-2:]:
            while best > 1 and (size * item) % best:
                best //= 2
            if (size * item) % LOADED_BYTES:
                odd.add(size)
    return best, sorted(odd, reverse=True)
