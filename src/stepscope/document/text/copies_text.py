"""Where copies come from, on one screen: forward, backward and optimizer apart."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.document.text.trace_tables import Column, table_lines
from stepscope.formatting import average, duration, percent, plural, safe, shortened, size
from stepscope.session.copies_view import CopiesReport

_GLUE = "\N{NO-BREAK SPACE}"
_ORDER = ("data", "forward", "backward", "optimizer")
CAUSES = {
    "autocast_weight": "weight cast", "autocast_gradient": "gradient cast", "mixed_dtypes": "mixed dtypes",
    "called": "called", "inside": "inside an op", "compiled": "compiled", "unknown": "not known",
}  # fmt: skip


def copies_text(report: CopiesReport, most: int, width: int = 100) -> str:
    """The screen: what copies cost, then a table a phase, then the weights that autocast casts."""
    name = safe(Path(report.path).name or report.path)
    where = "GPU" if report.is_on_gpu else "CPU"
    lines = [shortened(f"{name}   {where}   {plural(report.num_steps, 'step')}", width), ""]
    lines += _wrapped(verdict(report), width)
    for phase in _phases(report):
        rows = [row for row in report.rows if (row["phase"] or "outside every phase") == phase]
        lines += ["", *_table(phase, rows, most, width)]
    if report.rows:
        lines += [*_wrapped(_LEGEND + (_LEGEND_OF_GPU if report.is_on_gpu else ""), width, "  ")]
    if (text := weights_sentence(report)) is not None:
        lines += ["", *_wrapped(text, width)]
    lines += [line for note in report.notes for line in ("", *_wrapped(note, width))]
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


_LEGEND = "a step; saves: how much shorter a step is without it, by the replay"
_LEGEND_OF_GPU = (
    ": less than its time where the GPU waits for the host anyway, more where the host's time for it counts"
)


def verdict(report: CopiesReport) -> str:
    """What copies take of a step, and what it would be without them."""
    if not report.rows:
        return "No copy, cast, contiguous or clone is in the steps of this trace."
    total_ns = sum(row["total_ns"] for row in report.rows)
    num_calls = sum(row["num_calls"] for row in report.rows)
    of = "the GPU's busy time" if report.is_on_gpu else "the host's time"
    share = f" ({percent(total_ns / report.whole_ns)} of {of})" if report.whole_ns else ""
    return (
        f"Copies a step: {average(num_calls)}, which take {duration(total_ns)}{share}. Without any of them a step "
        f"of {duration(report.step_ns)} would be {duration(report.saving_ns)} shorter, by the replay."
    )


def weights_sentence(report: CopiesReport) -> str | None:
    """What autocast casts of weights; None where it casts none."""
    casts = report.weight_casts
    if casts is None:
        return None
    text = (
        f"Autocast casts {size(casts.weight_bytes)} of weights to {size(casts.cast_bytes)} "
        f"({casts.cast_bytes / casts.weight_bytes:.2f} of their bytes) in {duration(casts.total_ns)} a step"
    )
    if casts.written_bytes > casts.cast_bytes:
        text += f", {average(casts.written_bytes / casts.cast_bytes)} times over: {size(casts.written_bytes)} written"
    return f"{text}."


def _phases(report: CopiesReport) -> list[str]:
    found = {row["phase"] or "outside every phase" for row in report.rows}
    return sorted(found, key=lambda phase: (_ORDER.index(phase) if phase in _ORDER else len(_ORDER), phase))


def _table(phase: str, rows: Sequence[Mapping[str, Any]], most: int, width: int) -> Iterator[str]:
    shown, rest = rows[:most], rows[most:]
    names = [_called(row) for row in shown]
    cells = [*shown]
    if rest:
        names.append(f"{len(rest):,} more")
        cells.append(
            {
                "what": "", "cause": None, "num_calls": sum(row["num_calls"] for row in rest),
                "bytes": sum(row["bytes"] or 0 for row in rest), "total_ns": sum(row["total_ns"] for row in rest),
                "share": sum(row["share"] or 0 for row in rest), "saving_ns": None,
            }
        )  # fmt: skip
    columns = [
        Column("what", [str(row["what"]).replace("_", " ") for row in cells], rank=4),
        Column("why", [CAUSES.get(row["cause"], "") for row in cells], rank=1),
        Column("calls", [average(row["num_calls"]) for row in cells], rank=2),
        Column("moved", ["–" if row["bytes"] is None else size(row["bytes"]) for row in cells]),
        Column("time", [duration(row["total_ns"], 3) for row in cells]),
        Column("share", ["–" if row["share"] is None else percent(row["share"]) for row in cells], rank=3),
        Column("saves", ["–" if row["saving_ns"] is None else duration(row["saving_ns"], 3) for row in cells]),
    ]
    lines = table_lines(phase, names, columns, width)
    yield from lines[: -len(cells)]  # the header, one line or two
    for line, row in zip(lines[-len(cells) :], cells):
        yield line
        yield from _wrapped(_place(row), width, "      ")


def _place(row: Mapping[str, Any]) -> str:
    """`in blocks.*.qkv at model.py:12`, or nothing."""
    told = {"in": row.get("module"), "at": row.get("caller")}
    return " ".join(f"{word} {safe(name, 200)}" for word, name in told.items() if name)


def source_name(row: Mapping[str, Any]) -> str:
    """`to for linear in blocks.*.qkv`: what copies, for which op, in which module, called where."""
    return f"{_called(row)} {_place(row)}".rstrip()


def _called(row: Mapping[str, Any]) -> str:
    op, root = (short_op(row[name]) for name in ("op", "root_op"))
    text = op if root in (None, op) else f"{op} for {root}"
    return text or str(row["what"]).replace("_", " ")


def short_op(op: str | None) -> str | None:
    """An op without `aten::`."""
    return None if op is None else safe(op, 200).removeprefix("aten::")


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    glued = re.sub(r"(?<=\d) (?=%|(?:ns|µs|ms|s|B|[KMG]iB)\b)", _GLUE, text)
    lines = textwrap.wrap(glued, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines]
