"""The section `copies`: where copies and casts come from, and what a step would save without each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepscope.document.model import Bars, Document, Missing, Part, Section, Series, Table, Text
from stepscope.document.tables import columns_of, without_empty
from stepscope.errors import Unavailable
from stepscope.formatting import average, duration, percent, safe, size
from stepscope.session import Session
from stepscope.session.reports import CopiesReport

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
    rows, times = report.rows[:NUM_BARS], [row["total_ns"] for row in report.rows]
    if total_ns := sum(times):
        share = percent(sum(times[:NUM_BARS]) / total_ns)
        caption = f"These {len(rows)} of {len(report.rows)} sources have {share} of the time."
        labels = [f"{row['phase'] or 'outside'}: {source_name(row)}, {CAUSES.get(row['cause'], '')}" for row in rows]
        title, series = "Copies by where they come from", (Series("time", times[:NUM_BARS]),)
        yield Bars("copies_by_source", title, labels, series, "total_ns", caption=caption, page_only=True)


def _sources(report: CopiesReport, rows: Sequence[Mapping[str, Any]], title: str = "Where copies come from") -> Table:
    columns = columns_of(
        rows,
        "phase what cause op called_for num_calls bytes total_ns saving_ns share module caller",
        what=_what,
        cause=lambda row: CAUSES.get(row["cause"], row["cause"]),
        op=lambda row: _short_op(row["op"]),
        called_for=lambda row: _short_op(row["root_op"]),
    )
    note = f"Per step. Share: of {_whole(report)}. Saving: how much shorter the step is when replayed without it"
    if report.is_on_gpu:
        note += ", less than its time if the GPU waits for the host anyway, more if its host time counts"
    screen = ("op", "total_ns", "saving_ns", "bytes", "cause", "num_calls", "called_for", "share", "what")
    below = ("module", "caller")
    return Table("copy_sources", title, without_empty(columns), note=f"{note}.", screen=screen, below=below)


def source_name(row: Mapping[str, Any]) -> str:
    """Return what copies, for which op, in which module and where: `to for linear in blocks.*.qkv at model.py:12`."""
    op, root = (_short_op(row[name]) for name in ("op", "root_op"))
    text = (op if root in (None, op) else f"{op} for {root}") or _what(row)
    places = {"in": row.get("module"), "at": row.get("caller")}
    return " ".join([text, *(f"{word} {safe(name, 200)}" for word, name in places.items() if name)])


def _what(row: Mapping[str, Any]) -> str:
    return str(row["what"]).replace("_", " ")


def _short_op(op: str | None) -> str | None:
    return None if op is None else safe(op, 200).removeprefix("aten::")
