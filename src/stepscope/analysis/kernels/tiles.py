"""Matrix products by how much of the GPU they fill: output tiles per SM."""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.tensor_sizes import product

# nvjet_sm90_tst_192x128_64x5, cutlass_80_tensorop_bf16_s16816gemm_128x64_…, tilesize128x128x64
_TILE = re.compile(r"(?:_|tilesize|tile)(\d{1,3})x(\d{1,3})(?=[x_])")
_USUAL_TILE = (128, 128)
_GROUPED = ("aten::_grouped_mm", "aten::grouped_mm")
_MOVING = ("copy_cast", "memset_memcpy")
_SCHEMA = pl.Schema(
    {
        "root": pl.UInt32(), "step": pl.Int64(), "phase": pl.String(), "op": pl.String(), "batch": pl.Int64(),
        "num_rows": pl.Int64(), "inner": pl.Int64(), "num_columns": pl.Int64(), "num_tiles": pl.Int64(),
        "flops": pl.Int64(), "bytes": pl.Int64(), "peak_dtype": pl.String(), "duration_ns": pl.Int64(),
        "event": pl.Int64(), "has_work_before": pl.Boolean(), "has_attention_before": pl.Boolean(),
    }
)  # fmt: skip


def tiled_products(work: pl.DataFrame) -> pl.DataFrame:
    """Return products of two matrices by time.

    `root` is the op that the program called (of the forward, for a backward). `num_tiles` uses the tile size in the
    kernel's name, else 128 × 128. The last columns tell whether anything but copies and fills, and whether attention,
    ran on the stream since the previous product.
    """
    rows: list[tuple[Any, ...]] = []
    other, attention = False, False
    columns = ("root", "root_op", "step", "phase", "op", "shapes", "dtypes", "name", "class", "flops", "bytes",
               "peak_dtype", "duration_ns", "event")  # fmt: skip
    ordered = work.sort("device", "stream", "start_ns").select(columns)
    for row in ordered.with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True):
        attention |= str(row["class"]).startswith("attention")
        sizes = product(row["op"], operands(row["shapes"], row["dtypes"])) if row["flops"] else None
        # Without grouped products on a device, torch runs their parts one by one: the program cannot change that.
        if sizes is None or row["root_op"] in _GROUPED:
            other |= row["class"] not in _MOVING and row["flops"] is not None
            continue
        batch, num_rows, inner, num_columns = sizes
        num_tiles = batch * _tiles(str(row["name"]), num_rows, num_columns)
        rows.append(
            (
                row["root"], row["step"], row["phase"], row["op"], batch, num_rows, inner, num_columns, num_tiles,
                row["flops"], row["bytes"], row["peak_dtype"], row["duration_ns"], row["event"], other, attention,
            )
        )  # fmt: skip
        other, attention = False, False
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _tiles(kernel: str, num_rows: int, num_columns: int) -> int:
    found = _TILE.search(kernel)
    # A library that computes the transpose swaps the sizes: use the smaller number of tiles.
    high, wide = (int(found[1]), int(found[2])) if found else _USUAL_TILE
    return min(-(-num_rows // first) * -(-num_columns // second) for first, second in ((high, wide), (wide, high)))
