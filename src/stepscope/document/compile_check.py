"""Builds the document of compile checks: compiled against eager code at two shapes, and what the compiler did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison.sweeps import varying_axes
from stepscope.analysis.compiler.compile_summary import CompilerSummary, compiler_summary
from stepscope.document.model import Document, Part, Section, Table, Text
from stepscope.document.sections.compiler import summary_parts, summary_verdict
from stepscope.document.tables import columns_of, without_empty
from stepscope.formatting import safe

VERDICTS = {"ok": "same", "wrong": "differs"}


def check_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a check as JSON values: the row as it was written, and the compiler's figures."""
    summary = _summary(row)
    kept = {name: value for name, value in row.items() if name not in ("compiler_report", "stage")}
    return {**kept, "verdict": _verdict(row), "compiler": None if summary is None else summary.to_json()}


def checks_document(rows: Sequence[Mapping[str, Any]]) -> Document:
    axes = [{"preset": row["preset"], **row["config"], **row["run"]} for row in rows]
    varying = list(varying_axes(axes)[0])
    titles = []
    for row, values in zip(rows, axes):
        run = row["run"]
        named = ", ".join(f"{name}={safe(values[name])}" for name in varying if values.get(name) is not None)
        how = named or f"compile={run['compile']}, {run['mode']}, {run['dtype']}, {run['device']}"
        titles.append(f"{safe(row['workload'])}, {how}: {_verdict(row)}")
    sections = [Section("check", title, tuple(_parts(row))) for title, row in zip(titles, rows)]
    counts = ", ".join(f"{number} {verdict}" for verdict, number in Counter(map(_verdict, rows)).items())
    verdict = titles[0] if len(rows) == 1 else f"{len(rows)} checks: {counts}"
    return Document("Compile checks", verdict, tuple(sections))


def _verdict(row: Mapping[str, Any]) -> str:
    """Return `same`, `differs`, `does not compile`, or the status of a check that did not finish."""
    if row.get("compiles") is False:
        return "does not compile"
    return VERDICTS.get(str(row["status"]), str(row["status"]))


def _summary(row: Mapping[str, Any]) -> CompilerSummary | None:
    """Return the compiler's figures with the times of the first shape; None if nothing was compiled."""
    report = row.get("compiler_report")
    if not isinstance(report, dict) or not report.get("num_compiles"):
        return None
    first: Mapping[str, Any] = next(iter(row.get("shapes") or ()), {})
    return compiler_summary(report, first.get("compiled_ns"), first.get("eager_ns"))


def _parts(row: Mapping[str, Any]) -> Iterator[Part]:
    if row.get("reason"):
        yield Text(safe(row["reason"], 600))
    shapes = [shape for shape in row.get("shapes") or () if "first_call_ns" in shape]
    columns = columns_of(
        shapes,
        "shape first_call_ns compiled_ns eager_ns output_deviation gradient_deviation is_same",
        shape=lambda one: ", ".join(f"{name}={value}" for name, value in one["shape"].items()) or "as built",
        output_deviation=lambda one: _deviation(one, "outputs"),
        gradient_deviation=lambda one: _deviation(one, "gradients"),
        is_same=lambda one: bool(one["passed"]),
    )
    yield Table("check_shapes", "Compiled against eager code", without_empty(columns))
    if (summary := _summary(row)) is not None:
        yield Text(summary_verdict(summary))
        yield from summary_parts(summary)
    if len(row.get("shapes") or ()) == 1 and row["status"] == "ok":
        yield Text("Only one shape was checked. Name a knob with two values, such as --shapes batch=4,6.")


def _deviation(shape: Mapping[str, Any], kind: str) -> str | None:
    if kind not in shape["deviations"]:
        return None
    value = shape["deviations"][kind]
    return "not a number" if value is None else f"{value:.1e}" if value else "0"
