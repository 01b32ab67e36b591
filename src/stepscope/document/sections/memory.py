"""The section `memory`: what filled the memory at the peak, what is largest, and how it grows with the shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.analysis.memory.account import REMAINDER, Account
from stepscope.analysis.memory.account import Part as Live
from stepscope.analysis.memory.growth import Growth
from stepscope.analysis.memory.module_tree import ModuleBytes, alike, ancestors, frontier
from stepscope.analysis.memory.size_formulas import SYMBOLS
from stepscope.document.memory_charts import memory_charts, module_title
from stepscope.document.memory_facts import in_words, memory_facts, memory_sentences
from stepscope.document.model import Document, Facts, Missing, Part, Section, Table, Text, Value
from stepscope.formatting import safe, size
from stepscope.session import Session
from stepscope.session.memory import SNAPSHOT, TRACE, MemoryReport
from stepscope.session.memory_growth import MemoryAnalysis

NUM_MODULES = 8
MOST_STAGES = 12
"""Stages that a terminal shows: those around the peak."""
OTHERS = "other modules"
Columns = dict[str, Sequence[Value]]


def parts(session: Session) -> tuple[Part, ...]:
    """Return the verdict, leaks, charts over the step and at the peak, tables and facts."""
    report = session.memory
    if not report.account.num_allocations:
        return tuple(_tables(report))
    texts = (Text(text) for text in memory_sentences(report))
    return (*texts, *memory_charts(report.account, session.allocations), *_tables(report))


def memory_document(analysis: MemoryAnalysis, num_rows: int = NUM_MODULES) -> Document:
    """Return the memory of the first source; of two recordings, also how memory grows from one to the other."""
    report = analysis.reports[0]
    sections = [
        Section("memory", f"Memory of {Path(report.path).name}", tuple(_tables(report, num_rows, MOST_STAGES)))
    ]
    if analysis.growth is not None:
        sections.append(_growth(analysis.growth, [Path(each.path).name for each in analysis.reports], num_rows))
    return Document(f"Memory of {report.path}", " ".join(memory_sentences(report)), tuple(sections))


def _tables(report: MemoryReport, num_rows: int = NUM_MODULES, most_stages: int | None = None) -> Iterator[Part]:
    found, live, is_snapshot = report.account, report.account.live_at_peak, report.source == SNAPSHOT
    if not found.num_allocations:
        yield Missing(f"memory of {safe(found.device, 20)}. No allocation on it was recorded")
        return
    if report.source == TRACE:
        text = "which memory is parameters, gradients or activations. `stepscope run train.py` records it"
        yield Missing(text, page_only=True)
    at_peak = f"alive at the peak of {size(found.peak_bytes)}"
    if any(part.name not in (None, REMAINDER) for part in live.by_owner):  # a trace has no owners
        owners = [replace(part, name=in_words(part.name)) for part in live.by_owner]
        note = (
            "in no tensor: allocator rounding, workspaces and temporaries inside kernels"
            if found.remainder_bytes
            else ""
        )
        yield from live_table("owner", f"{at_peak}, by owner", owners, 20, note=note)
    yield from _stages(found, most_stages)
    yield from _modules(found, num_rows)
    yield from live_table("op", f"{at_peak}, by op", _tensors(live.by_op), num_rows)
    yield from live_table(
        "called_at", f"{at_peak}, by line of Python", _tensors(live.by_caller), num_rows, page_only=not is_snapshot
    )
    yield from _kept(found, num_rows)
    yield largest(found, num_shown=num_rows)
    if report.snapshot_end:
        by_caller = report.snapshot_end.live_by_caller
        yield from live_table(
            "called_at", "alive at the end, by line of Python", by_caller, num_rows, id="live_at_end"
        )
    yield Facts(tuple(memory_facts(report)))
    yield from _left_alive(found)


def live_table(
    name: str,
    title: str,
    parts: Sequence[Live],
    num_shown: int,
    *,
    id: str = "",
    note: str = "",
    page_only: bool = False,
) -> Iterator[Table]:
    """Yield parts of what is alive as a table, if the name of any is known."""
    if any(part.name not in (None, REMAINDER) for part in parts):
        columns: Columns = {
            name: [in_words(part.name) if part.name in (None, REMAINDER) else part.name for part in parts],
            "live_bytes": [part.bytes for part in parts],
            "share": [part.share for part in parts],
            "num_allocations": [part.num_allocations for part in parts],
        }
        yield Table(id or f"live_by_{name}", title, columns, num_shown, note, page_only=page_only)


def _tensors(parts: Sequence[Live]) -> list[Live]:
    return [part for part in parts if part.name != REMAINDER]


def largest(found: Account, most: int | None = None, num_shown: int = 12) -> Table:
    """Return the places that make the largest allocations, all of them or the first `most`."""
    rows = found.largest[:most]
    columns: Columns = {
        "op": [large.op for large in rows],
        "module": [large.module for large in rows],
        "each_bytes": [large.bytes for large in rows],
        "num_allocations": [large.num_allocations for large in rows],
        "num_at_peak": [large.num_at_peak for large in rows],
        "formula": [large.formula for large in rows],
        "shape": [None if large.shape is None else "×".join(map(str, large.shape)) for large in rows],
        "dtype": [large.dtype for large in rows],
        "phase": [large.phase for large in rows],
        "owner": [large.owner for large in rows],
        "called_at": [large.caller for large in rows],
    }
    screen = (
        "op",
        "each_bytes",
        "num_allocations",
        "formula",
        "module",
        "owner",
        "shape",
        "phase",
        "called_at",
        "dtype",
    )
    title = "Largest allocations, by the place that makes them"
    return Table("largest_allocations", title, _known(columns), num_shown, screen=screen)


def _stages(found: Account, most: int | None) -> Iterator[Table]:
    """Yield the stages of the step, or the `most` of them around the peak."""
    if len(found.stages) < 2:
        return
    highest, first = max(stage.peak_bytes for stage in found.stages), 0
    if most is not None:
        place = sum(stage.first_event <= found.peak_event for stage in found.stages)
        first = max(0, min(place - most // 2, len(found.stages) - most))
    stages = found.stages[first : None if most is None else first + most]
    columns: Columns = {
        "stage": [in_words(stage.name) for stage in stages],
        "when_it_ended_bytes": [stage.after_bytes for stage in stages],
        "at_most_bytes": [stage.peak_bytes for stage in stages],
        "has_the_peak": [stage.peak_bytes == highest for stage in stages],
    }
    note = f"{len(stages)} of {len(found.stages)} stages, around the peak" if len(stages) < len(found.stages) else ""
    yield Table("memory_stages", "Memory by stage", columns, 24, note)


def _modules(found: Account, num_rows: int) -> Iterator[Table]:
    """Yield the modules that together hold what is alive at the peak, in about `num_rows` rows."""
    sizes = {part.name: part.bytes for part in found.live_at_peak.by_module if part.name != REMAINDER}
    if not any(name is not None for name in sizes):
        return
    rows = frontier(sizes, num_rows)
    columns: Columns = {
        "module": [module_title(name) for name, _ in rows],
        "live_bytes": [num_bytes for _, num_bytes in rows],
        "share": [num_bytes / max(1, found.peak_bytes) for _, num_bytes in rows],
    }
    note = "including submodules; * stands for every number"
    yield Table("live_by_module", "Alive at the peak, by module", columns, num_rows, note)


def _kept(found: Account, num_rows: int) -> Iterator[Table]:
    """Yield activations and what autograd saved: in about `num_rows` groups of modules, and by every module."""
    kinds = {"activations": found.activations, "saved": found.saved}
    by_kind = {kind: {row.module: row for row in rows} for kind, rows in kinds.items() if rows}
    if not by_kind:
        return
    names = list(dict.fromkeys(name for rows in by_kind.values() for name in rows))
    most = {name: max(rows[name].bytes for rows in by_kind.values() if name in rows) for name in names}
    groups = alike(held := {name: num_bytes for name, num_bytes in most.items() if num_bytes})
    shown: list[str | None] = [name for name, _ in frontier(held, num_rows)][:num_rows]
    sums: dict[str, Counter[str | None]] = {kind: Counter() for kind in by_kind}
    for kind, rows in by_kind.items():
        for name, row in rows.items():
            around = ancestors(groups.get(name, name))
            sums[kind][next((each for each in around if each in shown), OTHERS)] += row.bytes
    shown += [OTHERS] if any(table[OTHERS] for table in sums.values()) else []
    title, note = "Kept for backward, by module", "activations: the most at one time"
    note += "; saved: what autograd packed, parameters excluded" if found.saved else ""
    columns: Columns = {"module": [module_title(name) for name in shown]}
    columns |= {f"{kind}_bytes": [table[name] for name in shown] for kind, table in sums.items()}
    yield Table("kept_by_module", title, columns, len(shown), note)
    nothing = ModuleBytes(None, 0, 0, 0)
    columns = {"module": [module_title(name) for name in names]}
    for kind in ("activations", *(["saved"] if found.saved else [])):
        every = [by_kind.get(kind, {}).get(name, nothing) for name in names]
        columns[f"{kind}_bytes"] = [row.bytes for row in every]
        columns[f"{kind}_with_inner_bytes"] = [row.total_bytes for row in every]
    yield Table("kept_for_backward", "Kept for backward, every module", columns, note=note, page_only=True)


def _left_alive(found: Account) -> Iterator[Table]:
    if rows := found.left_alive:
        columns: Columns = {
            "op": [left.op for left in rows],
            "module": [left.module for left in rows],
            "left_bytes": [left.bytes for left in rows],
            "num_tensors": [left.num_tensors for left in rows],
            "held_at": [left.frame for left in rows],
        }
        yield Table("left_alive", "Graphs of earlier steps that are still alive", _known(columns), below=("held_at",))


def _growth(found: Growth, names: Sequence[str], num_rows: int) -> Section:
    sides = [f"{found.symbol}={value:,}" for value in found.values]
    where = ", ".join(f"{side} in {safe(name, 40)}" for side, name in zip(sides, names))
    text = f"{where}. The peaks are {' and '.join(size(num_bytes) for num_bytes in found.peak_bytes)}."
    if any(found.num_unmatched):
        counts = " and ".join(f"{number:,}" for number in found.num_unmatched)
        text += f" {counts} allocations have no counterpart in the other recording."
    at_peak: Columns = {"growth": [row.growth for row in found.at_peak], **_sides(sides, found.at_peak)}
    grown = [row for row in found.rows if row.growth != "constant"]
    rows: Columns = {
        "op": [row.op for row in grown],
        "module": [row.module for row in grown],
        "owner": [row.owner for row in grown],
        "phase": [row.phase for row in grown],
        "num_allocations": [row.num_allocations for row in grown],
        **_sides(sides, grown),
        "growth": [row.growth if row.growth != "other" else f"^{row.exponent:.2f}" for row in grown],
        "formula": [row.formula for row in grown],
    }
    screen = ("op", *_sides(sides, ()), "growth", "module", "formula", "num_allocations", "phase", "owner")
    tables = (
        Table("growth_at_peak", f"Alive at the peak of {sides[0]}, in both", at_peak),
        Table("growth", "What grows", _known(rows), num_rows, screen=screen),
    )
    return Section("growth", f"How memory grows with {SYMBOLS[found.symbol]}", (Text(text), *tables))


def _sides(names: Sequence[str], rows: Sequence[Any]) -> Columns:
    """Return the bytes of both recordings under their names."""
    return {f"{name}_bytes": [row.bytes[side] for row in rows] for side, name in enumerate(names)}


def _known(columns: Mapping[str, Sequence[Value]]) -> Columns:
    """Return the columns of which at least one value is known."""
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}
