"""Where the copies and casts of a step come from, and what the step would save without each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.kernels.copy_sources import CAUSES, copy_sources, copy_summary, weight_casts
from stepscope.session.case import Case

SCHEMA_VERSION = 1
MOST_REPLAYED = 40  # sources whose saving is computed, most time first: each takes a replay of the step


@dataclass(frozen=True)
class WeightCasts:
    """The weights that autocast casts per step."""

    weight_bytes: int  # size of the cast weights in the dtype they are stored in
    cast_bytes: int  # size of one cast of each weight
    written_bytes: int  # written per step: more than `cast_bytes` if micro-batches cast again
    total_ns: float


@dataclass(frozen=True)
class CopiesReport:
    """The copies of a typical step."""

    path: str
    is_on_gpu: bool  # whether times are GPU times; otherwise host times
    num_steps: int
    step_ns: float  # step time without the profiler, measured or replayed
    whole_ns: float  # what shares refer to: GPU busy time per step, or the step on the host
    saving_ns: float  # what a step saves without any copy: at least the largest saving, at most their sum
    rows: tuple[Mapping[str, Any], ...]  # of `copy_summary`, with `saving_ns` (null if not computed)
    weight_casts: WeightCasts | None
    notes: tuple[str, ...]

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Return what `--json` prints (docs/copies.md)."""
        casts = None if self.weight_casts is None else vars(self.weight_casts)
        fields = {**vars(self), "weight_casts": casts, "causes": CAUSES, "notes": list(self.notes)}
        copies = [dict(row) for row in fields.pop("rows")[:most]]
        return {"schema_version": SCHEMA_VERSION, **fields, "copies": copies}


def copies_report(case: Case) -> CopiesReport:
    """Return the copies of a trace's typical steps."""
    linked, replay = case.linked, case.replay
    is_on_gpu = case.has_gpu_work
    sources = copy_sources(linked)
    sources = sources.filter(pl.col("event").is_in(replay.events)) if is_on_gpu else case.within(sources)
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
    """Return what a step saves without some copies and the host time for them."""
    if is_on_gpu and events:
        return case.saving_ns(case.without(events))
    return case.host_saving_ns(case.linked.host.filter(pl.col("event").is_in(events)))
