"""Reports of a step's attention calls and of its copies: what each takes, why, and what the step would save."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.attention.reasons import Reason, reasons, recorded_callers
from stepscope.analysis.attention.sites import SIGNATURE, attention_sites, attention_summary
from stepscope.analysis.kernels.copy_sources import CAUSES, copy_sources, copy_summary, weight_casts
from stepscope.analysis.memory.module_tree import starred
from stepscope.analysis.ranks.rank_account import device_name
from stepscope.devices import find_device
from stepscope.errors import Unavailable, UsageError
from stepscope.session.case import Case

SCHEMA_VERSION = 1
NO_WORDS = (
    "PyTorch's own reasons. Those above follow from its documented rules; `stepscope run train.py` records its own"
)
NO_SHAPES = "what the calls were given. The trace has no shapes; record with record_shapes=True"


@dataclass(frozen=True)
class AttentionRow:
    """Calls per step with the same inputs."""

    call: Mapping[str, Any]  # a row of `attention_summary`
    reasons: tuple[Reason, ...]  # why it did not run on flash attention; empty if it did

    def to_json(self) -> dict[str, Any]:
        return {**self.call, "reasons": [reason.to_json() for reason in self.reasons]}


@dataclass(frozen=True)
class AttentionReport:
    """The attention calls of a recording or a trace."""

    path: str
    device: str | None
    is_on_gpu: bool  # whether times are GPU times; otherwise host times
    num_steps: int
    step_ns: float | None  # mean traced step; null if the trace has no steps
    rows: tuple[AttentionRow, ...]  # most time first
    notes: tuple[str, ...]  # what the source does not contain

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Return what `--json` prints (docs/attention.md)."""
        fields = {**vars(self), "notes": list(self.notes)}
        calls = [row.to_json() for row in fields.pop("rows")[:most]]
        return {"schema_version": SCHEMA_VERSION, **fields, "calls": calls}


def attention_report(case: Case, step: int | None = None) -> AttentionReport:
    """Return the attention calls of the trace, or of one step; without a trace, those that the recorder saw."""
    recorded = case.recording.facts.get("attention", []) if case.has_recording else []
    try:
        linked = case.linked
    except Unavailable:
        if not recorded:
            raise
        return _without_trace(case, recorded)
    calls, steps = attention_sites(linked), linked.steps.table
    if step is not None:
        steps = steps.filter(pl.col("step") == step)
        if steps.is_empty():
            numbers = linked.steps.table["step"].to_list()
            known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
            raise UsageError(f"there is no step {step}: the trace has {known}")
    if linked.steps.num:
        calls = calls.filter(pl.col("step").is_in(steps["step"].implode()))
    table = attention_summary(calls, steps.height)
    table = table.with_columns(recorded_callers(table, recorded))
    is_on_gpu = linked.device.height > 0
    name = device_name(linked) if is_on_gpu else "CPU"
    device = find_device(name) if name and is_on_gpu else None
    capability = None if device is None else device.compute_capability
    calls_by_time = table.iter_rows(named=True)
    rows = tuple(AttentionRow(row, reasons(row, recorded, is_on_gpu, capability)) for row in calls_by_time)
    notes = [NO_WORDS] if rows and not recorded else []
    if any(row.call["dtype"] is None for row in rows):
        notes.append(NO_SHAPES)
    length_ns = float((steps["end_ns"] - steps["start_ns"]).sum()) / steps.height if steps.height else None
    return AttentionReport(str(case.path), name, is_on_gpu, steps.height, length_ns, rows, tuple(notes))


def _without_trace(case: Case, recorded: list[dict[str, Any]]) -> AttentionReport:
    rows: dict[str, dict[str, Any]] = {}
    for entry in recorded:
        row = _row(entry)
        known = rows.setdefault(repr(row), {**row, "num_calls": 0.0})
        known["num_calls"] += entry.get("num_calls", 1)
    on_gpu = any(entry.get("device") == "cuda" for entry in recorded)
    found = tuple(AttentionRow(row, reasons(row, recorded, on_gpu)) for row in rows.values())
    note = "times. The recording has no trace; the calls are those of its memory window"
    return AttentionReport(str(case.path), "GPU" if on_gpu else "CPU", on_gpu, 1, None, found, (note,))


def _row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded call as a row of `attention_summary`."""
    sizes: list[Any] = [entry.get(name) or () for name in ("query", "key", "value")]
    query, key, value = (one if len(one) >= 3 else [None] * 4 for one in sizes)
    mask = entry.get("mask")
    row: dict[str, Any] = dict.fromkeys(SIGNATURE)
    row |= {name: entry.get(name) for name in ("backend", "dtype", "is_causal", "dropout", "caller")}
    row |= {
        "batch": query[0] if len(query) > 3 else 1, "num_heads": query[-3], "num_key_heads": key[-3],
        "num_queries": query[-2], "num_keys": key[-2], "head_size": query[-1], "value_size": value[-1],
        "mask": None if mask is None else str(mask), "module": starred(entry.get("module")),
    }  # fmt: skip
    return row | dict.fromkeys(("forward_ns", "backward_ns", "beside_ns", "total_ns"))


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
