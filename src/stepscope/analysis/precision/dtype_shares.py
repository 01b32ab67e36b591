"""FLOPs, matrix products and casts by dtype."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.analysis.costs.flops import StepFlops


def flops_by_dtype(flops: StepFlops) -> list[Mapping[str, Any]]:
    """Return `model_flops`, `executed_flops` and `share` of executed by `dtype`, the largest first."""
    total = max(1, flops.hardware_flops)
    rows = [
        {
            "dtype": str(dtype),
            "model_flops": flops.model_flops_by_dtype.get(dtype, 0),
            "executed_flops": executed,
            "share": executed / total,
        }
        for dtype, executed in flops.hardware_flops_by_dtype.items()
    ]
    return sorted(rows, key=lambda row: (-row["executed_flops"], row["dtype"]))


def products_by_dtype(calls: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return matrix products per step by operand `dtype` and by `peak_dtype`, the peak that applies (or tf32)."""
    total = max(1, int(calls["duration_ns"].sum()))
    duration, flops = pl.col("duration_ns").sum(), pl.col("flops").sum()
    return (
        calls.group_by("dtype", "peak_dtype")
        .agg(
            (pl.len() / num_steps).alias("num_calls"),
            (duration / num_steps).alias("duration_ns"),
            (flops / num_steps).alias("flops"),
            (flops * 1e9 / duration.clip(1)).alias("flops_per_s"),
            (duration / total).alias("time_share"),
        )
        .sort("duration_ns", "dtype", "peak_dtype", descending=[True, False, False], nulls_last=True)
    )


def casts_by_use(casts: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return casts (`casts.py`) per step by dtypes and use, the longest first."""
    keys = ["source", "target", "is_autocast", "is_weight", "phase", "root_op"]
    return (
        casts.group_by(keys)
        .agg((pl.len() / num_steps).alias("num_casts"), pl.col("duration_ns").sum() / num_steps)
        .sort("duration_ns", "num_casts", *keys, descending=[True, True, *[False] * len(keys)], nulls_last=True)
    )
