"""In which number formats a step computes: FLOPs, matrix products and casts by dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.analysis.costs.flops import StepFlops


def flops_by_dtype(flops: StepFlops) -> list[Mapping[str, Any]]:
    """One row a dtype, most executed FLOPs first: `dtype`, `model_flops`, `executed_flops`, `share` of what was
    executed."""
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
    """Matrix products (`findings/gemms.py`) by `dtype` of their operands and `peak_dtype`, the device's peak that
    applies (tf32 where the kernel says so): `num_calls`, `duration_ns` and `flops` a step, `flops_per_s`,
    `time_share`."""
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
    """Casts (`casts.py`) by `source` and `target` dtype, `is_autocast`, `phase`, `root_op` and whether of a
    weight: `num_casts` and `duration_ns` of the GPU a step; most time first."""
    keys = ["source", "target", "is_autocast", "is_weight", "phase", "root_op"]
    return (
        casts.group_by(keys)
        .agg((pl.len() / num_steps).alias("num_casts"), pl.col("duration_ns").sum() / num_steps)
        .sort("duration_ns", "num_casts", *keys, descending=[True, True, *[False] * len(keys)], nulls_last=True)
    )
