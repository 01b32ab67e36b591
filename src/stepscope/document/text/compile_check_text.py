"""Checks of compiled against eager code: a row each, and below it what the compiler did."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison.sweeps import varying_axes
from stepscope.analysis.compiler.compile_summary import CompilerSummary, compiler_summary
from stepscope.document.text.compiler_text import compiler_lines
from stepscope.document.text.trace_tables import Column, table_lines
from stepscope.formatting import duration, safe

SAME, DIFFERS, DOES_NOT_COMPILE = "same", "differs", "does not compile"
VERDICTS = {"ok": SAME, "wrong": DIFFERS}
ONE_SHAPE = "One shape alone was run: name a knob of two, --shapes batch=4,6."


def check_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A check as JSON values: the row as it was left, and the compiler's figures."""
    summary = summary_of(row)
    kept = {name: value for name, value in row.items() if name not in ("compiler_report", "stage")}
    return {**kept, "verdict": verdict(row), "compiler": None if summary is None else summary.to_json()}


def verdict(row: Mapping[str, Any]) -> str:
    """`same`, `differs`, `does not compile`, or what else became of it."""
    if row.get("compiles") is False:
        return DOES_NOT_COMPILE
    return VERDICTS.get(str(row["status"]), str(row["status"]))


def summary_of(row: Mapping[str, Any]) -> CompilerSummary | None:
    """The compiler's figures of a check, against the first shape's times; None where nothing was compiled."""
    report = row.get("compiler_report")
    if not isinstance(report, dict) or not report.get("num_compiles"):
        return None
    first: Mapping[str, Any] = next(iter(row.get("shapes") or ()), {})
    return compiler_summary(report, first.get("compiled_ns"), first.get("eager_ns"))


def check_text(rows: Sequence[Mapping[str, Any]], most: int, width: int) -> str:
    """The table, then a part for each check."""
    axes = [{"preset": row["preset"], **row["config"], **row["run"]} for row in rows]
    varying = list(varying_axes(axes)[0])
    lines: list[str] = []
    for row, values in zip(rows, axes):
        named = ", ".join(f"{name}={safe(values[name])}" for name in varying if values.get(name) is not None)
        title = f"{safe(row['workload'])} {named}".strip() if named else f"{safe(row['workload'])}, {_how(row)}"
        lines += ["", f"{title}: {verdict(row)}"]
        if row.get("reason"):
            lines += _wrapped(safe(row["reason"], 600), width, "  ")
        lines += [f"  {line}" for line in _shape_lines(row, width - 2)]
        summary = summary_of(row)
        if summary is not None:
            lines += [f"  {line}".rstrip() for line in ("", *compiler_lines(summary, most, width - 2))]
        if len(row.get("shapes") or ()) == 1 and row["status"] == "ok":
            lines += ["", *_wrapped(ONE_SHAPE, width, "  ")]
    return "\n".join(line.rstrip() for line in lines[1:])


def _how(row: Mapping[str, Any]) -> str:
    run = row["run"]
    return f"compile={run['compile']}, {run['mode']}, {run['dtype']}, {run['device']}"


def _shape_lines(row: Mapping[str, Any], width: int) -> list[str]:
    shapes = [shape for shape in row.get("shapes") or () if "first_call_ns" in shape]
    if not shapes:
        return []
    names = [
        ", ".join(f"{name}={safe(value)}" for name, value in shape["shape"].items()) or "as built" for shape in shapes
    ]
    columns = [
        Column("first call", [duration(shape["first_call_ns"], 3) for shape in shapes]),
        Column("compiled", [_duration(shape.get("compiled_ns")) for shape in shapes]),
        Column("eager", [_duration(shape.get("eager_ns")) for shape in shapes]),
        Column("outputs off by", [_off(shape, "outputs") for shape in shapes]),
        Column("gradients off by", [_off(shape, "gradients") for shape in shapes]),
        Column("", ["" if shape["passed"] else DIFFERS for shape in shapes]),
    ]
    kept = [column for column in columns if any(cell not in ("", "–") for cell in column.cells)]
    return table_lines("shape", names, kept, width)


def _duration(ns: float | None) -> str:
    return "–" if ns is None else duration(ns, 3)


def _off(shape: Mapping[str, Any], kind: str) -> str:
    if kind not in shape["deviations"]:
        return "–"
    value = shape["deviations"][kind]
    return "not a number" if value is None else f"{value:.1e}" if value else "0"


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
