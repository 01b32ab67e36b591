"""The section `copies`: where copies and casts come from, and what a step would save without each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepscope.document.model import Bars, Document, Missing, Part, Section, Series, Table, Text
from stepscope.errors import Unavailable
from stepscope.formatting import average, duration, percent, safe, size
from stepscope.session import Session
from stepscope.session.copies import CopiesReport

NUM_BARS = 12
PHASES = ("data", "forward", "backward", "optimizer")
NONE = "No copy, cast, contiguous or clone found in the steps of this trace."
CAUSES = {
    "autocast_weight": "weight cast", "autocast_gradient": "gradient cast", "mixed_dtypes": "mixed dtypes",
    "called": "called", "inside": "inside an op", "compiled": "compiled", "unknown": "unknown",
}  # fmt: skip


def parts(session: Session) -> tuple[Part, ...]:
    """Return what copies cost, the weights that autocast casts, and every source with its saving."""
    report = session.copies
    if not report.rows:
        raise Unavailable(NONE)
    return (Text(_verdict(report)), *_notes(report), *_bars(report), _sources(report, report.rows))


def copies_document(report: CopiesReport) -> Document:
    """Return the copies of a typical step, a table for each phase."""
    by_phase: dict[str, list[Mapping[str, Any]]] = {phase: [] for phase in PHASES}
    for row in report.rows:
        by_phase.setdefault(row["phase"] or "outside every phase", []).append(row)
    tables = [_sources(report, rows, f"Copies in {phase}") for phase, rows in by_phase.items() if rows]
    tables[:-1] = [replace(table, note="") for table in tables[:-1]]
    section = Section("copies", "Copies", (*tables, *_notes(report)))
    return Document(f"Copies of {report.path}", _verdict(report) if report.rows else NONE, (section,))


def _verdict(report: CopiesReport) -> str:
    total_ns = sum(row["total_ns"] for row in report.rows)
    num_calls = sum(row["num_calls"] for row in report.rows)
    share = f" ({percent(total_ns / report.whole_ns)} of {_whole(report)})" if report.whole_ns else ""
    return (
        f"{average(num_calls)} copies per step take {duration(total_ns)}{share}. Replayed without any of them, a "
        f"step of {duration(report.step_ns)} is {duration(report.saving_ns)} shorter."
    )


def _whole(report: CopiesReport) -> str:
    return "GPU busy time" if report.is_on_gpu else "host time"


def _notes(report: CopiesReport) -> Iterator[Part]:
    """Yield what autocast casts of weights, if any, and what the trace does not have."""
    if (casts := report.weight_casts) is not None:
        text = (
            f"Autocast casts {size(casts.weight_bytes)} of weights to {size(casts.cast_bytes)} "
            f"({casts.cast_bytes / casts.weight_bytes:.2f} of their bytes) in {duration(casts.total_ns)} per step"
        )
        if casts.written_bytes > casts.cast_bytes:
            times = average(casts.written_bytes / casts.cast_bytes)
            text += f", {times} times over: {size(casts.written_bytes)} written"
        yield Text(f"{text}.")
    yield from map(Missing, report.notes)


def _bars(report: CopiesReport) -> Iterator[Bars]:
    rows = report.rows[:NUM_BARS]
    total_ns = sum(row["total_ns"] for row in report.rows)
    if not total_ns:
        return
    shown = sum(row["total_ns"] for row in rows)
    yield Bars(
        id="copies_by_source",
        title="Copies by where they come from",
        caption=f"These {len(rows)} of {len(report.rows)} sources have {percent(shown / total_ns)} of the time.",
        labels=[f"{row['phase'] or 'outside'}: {source_name(row)}, {CAUSES.get(row['cause'], '')}" for row in rows],
        series=(Series("time", [row["total_ns"] for row in rows]),),
        unit="total_ns",
        page_only=True,
    )


def _sources(report: CopiesReport, rows: Sequence[Mapping[str, Any]], title: str = "Where copies come from") -> Table:
    columns: dict[str, list[Any]] = {
        "phase": [row["phase"] for row in rows],
        "what": [str(row["what"]).replace("_", " ") for row in rows],
        "cause": [CAUSES.get(row["cause"], row["cause"]) for row in rows],
        "op": [_short_op(row["op"]) for row in rows],
        "called_for": [_short_op(row["root_op"]) for row in rows],
    }
    names = ("num_calls", "bytes", "total_ns", "saving_ns", "share", "module", "caller")
    columns |= {name: [row[name] for row in rows] for name in names}
    known = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    note = f"Per step. Share: of {_whole(report)}. Saving: how much shorter the step is when replayed without it"
    if report.is_on_gpu:
        note += ", less than its time if the GPU waits for the host anyway, more if its host time counts"
    screen = ("op", "total_ns", "saving_ns", "bytes", "cause", "num_calls", "called_for", "share", "what")
    return Table("copy_sources", title, known, note=f"{note}.", screen=screen, below=("module", "caller"))


def source_name(row: Mapping[str, Any]) -> str:
    """Return what copies, for which op, in which module and where: `to for linear in blocks.*.qkv at model.py:12`."""
    op, root = (_short_op(row[name]) for name in ("op", "root_op"))
    text = (op if root in (None, op) else f"{op} for {root}") or str(row["what"]).replace("_", " ")
    places = {"in": row.get("module"), "at": row.get("caller")}
    return " ".join([text, *(f"{word} {safe(name, 200)}" for word, name in places.items() if name)])


def _short_op(op: str | None) -> str | None:
    return None if op is None else safe(op, 200).removeprefix("aten::")
