"""What `stepscope analyze --copies` tells: where copies come from, and what a step would be without each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.kernels.copy_sources import CAUSES, copy_sources, copy_summary, weight_casts
from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.whatif import stretches
from stepscope.session.case import Case

SCHEMA_VERSION = 1
MOST_REPLAYED = 40
"""Sources of which the saving is worked out, most time first: each is a replay of the step."""


@dataclass(frozen=True)
class WeightCasts:
    """What autocast casts of weights in a step."""

    weight_bytes: int
    """Of the weights that are cast, as they are kept."""
    cast_bytes: int
    """Of one cast of each: half of that for two bytes an element."""
    written_bytes: int
    """In all a step: more than `cast_bytes` where micro-batches cast again."""
    total_ns: float


@dataclass(frozen=True)
class CopiesReport:
    """The copies of a typical step."""

    path: str
    is_on_gpu: bool
    """Whether times are of the GPU; else they are the host's."""
    num_steps: int
    step_ns: float
    """A clean step: as measured, else as replayed."""
    whole_ns: float
    """What shares are of: the GPU's busy time in a step, or the step on the host."""
    saving_ns: float
    """What a step would save without any of them: no less than each, no more than their sum."""
    rows: tuple[Mapping[str, Any], ...]
    """Rows of `copy_summary` without `events`, with `saving_ns`; None where it was not worked out."""
    weight_casts: WeightCasts | None
    notes: tuple[str, ...]

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """The object that `--json` prints (docs/copies.md)."""
        casts = self.weight_casts
        return {
            "schema_version": SCHEMA_VERSION,
            "path": self.path,
            "is_on_gpu": self.is_on_gpu,
            "num_steps": self.num_steps,
            "step_ns": self.step_ns,
            "whole_ns": self.whole_ns,
            "saving_ns": self.saving_ns,
            "copies": [dict(row) for row in self.rows],
            "weight_casts": None if casts is None else vars(casts),
            "causes": CAUSES,
            "notes": list(self.notes),
        }


def copies_report(case: Case) -> CopiesReport:
    """The report of a case: of the typical steps of its trace."""
    linked, replay = case.linked, case.replay
    is_on_gpu = case.has_gpu_work
    sources = copy_sources(linked)
    if is_on_gpu:
        sources = sources.filter(pl.col("event").is_in(replay.events))
    else:
        start = pl.col("start_ns")
        sources = sources.filter(start >= replay.start_ns, start < replay.end_ns)
    whole_ns = case.busy_ns if is_on_gpu else (replay.end_ns - replay.start_ns) / replay.num_steps
    table = copy_summary(sources, case.num_steps, whole_ns)
    rows = []
    for place, row in enumerate(table.iter_rows(named=True)):
        saving_ns = _saving_ns(case, row.pop("events"), is_on_gpu) if place < MOST_REPLAYED else None
        rows.append({**row, "saving_ns": saving_ns})
    casts = sources.filter(pl.col("cause") == "autocast_weight")
    found = weight_casts(sources, case.num_steps)
    weights = WeightCasts(*found, float(casts["duration_ns"].sum()) / case.num_steps) if found[0] else None
    notes = []
    if linked.host["shapes"].null_count() == linked.host.height:
        notes.append("bytes and dtypes of kernels. The trace has no shapes; record with record_shapes=True")
    return CopiesReport(
        str(case.path), is_on_gpu, case.num_steps, case.step_ns, whole_ns,
        _saving_ns(case, sources["event"].to_list(), is_on_gpu), tuple(rows), weights, tuple(notes),
    )  # fmt: skip


def _saving_ns(case: Case, events: list[int], is_on_gpu: bool) -> float:
    """What a step saves without some copies: replayed with the host's time for them gone too."""
    if not events:
        return 0.0
    if is_on_gpu:
        return case.saving_ns(case.without(pl.Series(events, dtype=pl.Int64)))
    spans = case.linked.host.filter(pl.col("event").is_in(events)).select("start_ns", "end_ns")
    return case.saving_ns(Change(host=stretches(spans)))
