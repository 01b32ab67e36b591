"""Whose business a wait of the host for the GPU is: shared by the rules about waits, so that none is told twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.session.case import Case

STAGED_BYTES = 64 * 1024
"""What the driver copies from pageable memory without making the host wait; also what a batch is larger than."""
_FEW_CHECKS = 2
"""NaN checks a step: a program may look at its loss."""


def waits_of(case: Case, owner: str) -> pl.DataFrame:
    """The rows of `case.waits` that are the business of one rule.

    Of `anomaly_detection`, where NaN is looked for again and again; of `device_round_trip`, at either end of a trip;
    of `pageable_copies`, for a large copy from pageable memory; all others of `synchronization`, but for a
    synchronization by the program itself that waits for nothing, or after which its step gives the GPU no more work:
    so a step is timed; or before which the trace has no kernel's launch: so a profiler begins.
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
    """The rows of `case.nan_checks`, where they are more than a step's own look at its loss."""
    checks = case.nan_checks
    return checks if checks.height > _FEW_CHECKS * case.num_steps else checks.clear()


def place(row: Mapping[str, Any]) -> str:
    """Where something was, from its `caller`, `module` or `phase`: the nearest that is known."""
    for name in ("caller", "module"):
        if row.get(name) is not None:
            return str(row[name])
    phase = row.get("phase")
    return f"the {phase}" if phase not in (None, "other") else "Python between the passes"


def starts_within(table: pl.DataFrame, stretches: pl.DataFrame) -> pl.Series:
    """Whether each row of a table in order of `start_ns` starts in one of the stretches, which do not overlap."""
    borders = stretches.select("start_ns", pl.col("end_ns").alias("until_ns")).sort("start_ns")
    found = table.select("start_ns").join_asof(borders, on="start_ns", check_sortedness=False)
    return (found["start_ns"] < found["until_ns"]).fill_null(False)
