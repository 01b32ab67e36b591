"""The section `copies` of a report: where copies come from, and what a step would be without each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.document.model import Bars, Missing, Series, Table, Text
from stepscope.document.text.copies_text import CAUSES, short_op, source_name, verdict, weights_sentence
from stepscope.errors import Unavailable
from stepscope.formatting import percent
from stepscope.session import Session
from stepscope.session.copies import CopiesReport

NUM_BARS = 12


def parts(session: Session) -> tuple[Any, ...]:
    """A sentence, time and saving by source, the weights that autocast casts, and the table."""
    report = session.copies
    if not report.rows:
        raise Unavailable(verdict(report))
    weights = weights_sentence(report)
    texts = [verdict(report), *([weights] if weights else [])]
    return (*map(Text, texts), *map(Missing, report.notes), *_bars(report), _table(report))


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
    )


def _table(report: CopiesReport) -> Table:
    rows = report.rows
    names = ("phase", "what", "op", "root_op", "module", "caller", "num_calls", "bytes", "total_ns", "share")
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in names}
    columns["what"] = [str(what).replace("_", " ") for what in columns["what"]]
    columns |= {name: [short_op(op) for op in columns[name]] for name in ("op", "root_op")}
    columns["cause"] = [CAUSES.get(row["cause"], row["cause"]) for row in rows]
    columns["saving_ns"] = [row["saving_ns"] for row in rows]
    order = ("phase", "what", "cause", "op", "root_op", *names[6:9], "saving_ns", "share", "module", "caller")
    shown = [name for name in order if any(value is not None for value in columns[name])]  # a trace has no caller
    of = "the GPU's busy time" if report.is_on_gpu else "a step on the host"
    return Table(
        "copy_sources",
        "Where copies come from",
        {("called_for" if name == "root_op" else name): columns[name] for name in shown},
        note=f"A step's. The share is of {of}; saving: how much shorter a step is without it, by the replay.",
    )
