"""Which rule reports a wait of the host for the GPU, so that none is reported twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.session.case import Case

STAGED_BYTES = 64 * 1024  # the driver copies less than this from pageable memory without waiting
_FEW_CHECKS = 2  # NaN checks per step; checking the loss is normal


def waits_of(case: Case, owner: str) -> pl.DataFrame:
    """Return the rows of `case.waits` that one rule reports.

    `anomaly_detection`: repeated NaN checks. `device_round_trip`: both ends of a trip. `pageable_copies`: large
    copies from pageable memory. `synchronization`: all others, except explicit ones that wait for nothing,
    end a step (timing code) or precede all launches (a starting profiler).
    """
    if case.work.is_empty():
        return case.waits
    ends = pl.concat([case.round_trips["out"], case.round_trips["back"]])
    in_trip = pl.col("copy").is_in(ends.implode()).fill_null(False)
    from_pageable = (
        (pl.col("what").cast(pl.String) == "host_to_device") & pl.col("pageable") & (pl.col("bytes") >= STAGED_BYTES)
    ).fill_null(False)
    is_timing = pl.col("outer_op").is_null() & pl.col("copy").is_null()
    is_timing = is_timing & (pl.col("is_closing") | pl.col("is_opening") | (pl.col("wait_ns").fill_null(0) == 0))
    whose = (
        pl.when(starts_within(case.waits, repeated_checks(case)))
        .then(pl.lit("anomaly_detection"))
        .when(in_trip)
        .then(pl.lit("device_round_trip"))
        .when(from_pageable)
        .then(pl.lit("pageable_copies"))
        .when(is_timing)
        .then(pl.lit("nobody"))
        .otherwise(pl.lit("synchronization"))
    )
    return case.waits.filter(whose == owner)


def repeated_checks(case: Case) -> pl.DataFrame:
    """Return `case.nan_checks` if there are more than a check of the loss, else no rows."""
    checks = case.nan_checks
    return checks if checks.height > _FEW_CHECKS * case.num_steps else checks.clear()


def place(row: Mapping[str, Any]) -> str:
    """Return the `caller`, `module` or `phase` of a row, the most exact that is known."""
    for name in ("caller", "module"):
        if row.get(name) is not None:
            return str(row[name])
    phase = row.get("phase")
    return (
        f"the {phase}" if phase not in (None, "other") else "Python code outside of forward, backward and optimizer"
    )


def starts_within(table: pl.DataFrame, stretches: pl.DataFrame) -> pl.Series:
    """Return whether each row (sorted by `start_ns`) starts within one of the non-overlapping stretches."""
    borders = stretches.select("start_ns", pl.col("end_ns").alias("until_ns")).sort("start_ns")
    found = table.select("start_ns").join_asof(borders, on="start_ns", check_sortedness=False)
    return (found["start_ns"] < found["until_ns"]).fill_null(False)
