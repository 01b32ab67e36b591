"""What rules are written with: the case, findings, changes to replay, and times and rows of evidence per step."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.whatif import stretches
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural, size, whole_percent
from stepscope.session.case import Case

__all__ = [
    "LENGTH", "Case", "Change", "Evidence", "Finding", "Unavailable", "cost_text", "duration", "grouped", "plural",
    "size", "stretches", "total_ns",
]  # fmt: skip

LENGTH = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
_DURATION = pl.col("duration_ns")


def total_ns(case: Case, table: pl.DataFrame, time: pl.Expr = _DURATION) -> float:
    """Return the sum of a table's durations in ns, per step."""
    return float(table.select(time.sum()).item() or 0) / case.num_steps


def grouped(case: Case, table: pl.DataFrame, count: str, *keys: str, time: pl.Expr = _DURATION) -> pl.DataFrame:
    """Return the number of rows and their time, both per step, by `keys`; the longest first."""
    rows = table.group_by(keys, maintain_order=True).agg(
        (pl.len() / case.num_steps).alias(count), time.sum() / case.num_steps
    )
    return rows.sort(time.meta.output_name(), descending=True)


def cost_text(case: Case, ns: float) -> str:
    """Return a time per step with its share of the step: `15.7 ms per step (25% of 61.7 ms)`."""
    share = f" ({whole_percent(ns / case.step_ns)} of {duration(case.step_ns, 3)})" if case.step_ns else ""
    return f"{duration(ns, 3)} per step{share}"
