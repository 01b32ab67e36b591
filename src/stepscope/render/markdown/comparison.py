"""A comparison as Markdown, for a pull request or a job's summary. Strangers' names cannot leave their cell."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.comparison.compare import Pair, Table
from stepscope.analysis.comparison.gates import FAILED, PASSED, UNDECIDED, Comparison
from stepscope.document.text.compare_words import (
    change_text,
    common_differs,
    delta_text,
    figure,
    gate_sentence,
    headline,
    interval_text,
    lacks,
    level_text,
    most_changed,
    shown_rows,
    shown_tables,
    signed,
    table_title,
    title_of,
    value_text,
    verdict_text,
)
from stepscope.formatting import percent
from stepscope.render.markdown.text import escaped

_SIGNS = {PASSED: "✅", FAILED: "❌", UNDECIDED: "⚠️"}


def compare_markdown(comparison: Comparison, most: int = 8) -> str:
    """The whole comparison: verdict and gates in sight, tables folded away."""
    is_one = len(comparison.pairs) == 1
    lines = ["### Stepscope: does it differ?", "", f"**{escaped(headline(comparison), 1000)}**", ""]
    lines += [f"base {escaped(comparison.base)}, new {escaped(comparison.new)}", ""]
    if comparison.gates:
        lines += [*_gates(comparison), ""]
    detailed = comparison.pairs[0] if is_one else most_changed(comparison)
    if is_one and detailed is not None:
        lines += _metrics(detailed)
    elif not is_one:
        lines += _points(comparison)
    if detailed is None:
        return "\n".join(lines) + "\n"
    tables = shown_tables(detailed)
    if tables:
        lines += ["<details><summary>Where the change comes from</summary>", ""]
        lines += [] if is_one else [f"at {escaped(detailed.name)}", ""]
        lines += [line for table in tables for line in _table(table, most)]
        lines += ["", "</details>", ""]
    differs = [*detailed.allowed, *common_differs(comparison.pairs)]
    if differs:
        rows = [(each.what, value_text(each.base), value_text(each.new)) for each in differs]
        lines += ["<details><summary>What differs</summary>", ""]
        lines += [*_grid(("what", "base", "new"), rows, ":--", ":--"), "", "</details>", ""]
    lines += [f"- {escaped(text, 600)}" for text in (*lacks(detailed), *detailed.notes)]
    for side, names in (("base", comparison.only_in_base), ("new", comparison.only_in_new)):
        lines += [f"- only in {side}: {escaped(', '.join(names), 600)}"] if names else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _gates(comparison: Comparison) -> list[str]:
    rows = [
        (
            f"{_SIGNS[gate.status]} {gate.status}",
            f"{gate.metric}:{100 * gate.limit_share:g}%",
            gate.pair or "",
            "" if gate.share is None else signed(percent(abs(gate.share)), gate.share),
            gate.reason,
        )
        for gate in sorted(comparison.gates, key=lambda gate: gate.status == PASSED)
    ]
    return [f"{gate_sentence(comparison)}", "", *_grid(("gate", "limit", "point", "change", ""), rows, ":--", ":--")]


def _metrics(pair: Pair) -> list[str]:
    if not pair.changes:
        return []
    rows = [
        (
            title_of(change.metric),
            figure(change.base, change.unit),
            figure(change.new, change.unit),
            change_text(change),
            interval_text(change),
            verdict_text(change),
        )
        for change in pair.changes
    ]
    return [*_grid(("", "base", "new", "change", "95 % interval", "verdict"), rows), ""]


def _points(comparison: Comparison) -> list[str]:
    rows = []
    for pair in comparison.pairs:
        step, peak = pair.change("step_time"), pair.change("peak_memory")
        why = "not comparable: " + ", ".join(each.what for each in pair.refused) if pair.refused else ""
        why = why or "; ".join(each.reason for each in pair.missing if each.what == "step_time")
        figures = ("", "", "", "") if step is None else (
            figure(step.base, step.unit), figure(step.new, step.unit), change_text(step), interval_text(step)
        )  # fmt: skip
        verdict = why if step is None else step.verdict
        rows.append((pair.name or pair.base, *figures, verdict, "" if peak is None else change_text(peak)))
    return [*_grid(("point", "base", "new", "change", "95 % interval", "verdict", "peak memory"), rows), ""]


def _table(table: Table, most: int) -> list[str]:
    rows = [
        (name, level_text(table, base), level_text(table, new), delta_text(table, delta))
        for name, base, new, delta in shown_rows(table, most)
    ]
    return [escaped(table_title(table)), "", *_grid(("", "base", "new", "change"), rows), ""]


def _grid(
    titles: Sequence[str], rows: Sequence[Sequence[object]], first: str = ":--", others: str = "--:"
) -> list[str]:
    """A table; every cell is taken for a stranger's."""
    lines = [f"| {' | '.join(titles)} |", f"|{first}|{f'{others}|' * (len(titles) - 1)}"]
    return lines + [f"| {' | '.join(escaped(cell) for cell in row)} |" for row in rows]
