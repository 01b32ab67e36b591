"""A comparison for the terminal: the verdict first, then figures, gates, where it comes from, what differs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from stepscope.analysis.comparison.compare import Differs, Pair, Table
from stepscope.analysis.comparison.gates import PASSED, Comparison, GateResult
from stepscope.document.card import BOLD, DIM, RESET
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
from stepscope.formatting import percent, plural, safe

_BAR = 20
_NAME = 36
_VALUE = 70


def compare_text(comparison: Comparison, most: int = 8, color: bool = False, width: int = 100) -> str:
    """The comparison for a terminal of so many columns; tables of names have `most` rows."""
    bold, dim, reset = (BOLD, DIM, RESET) if color else ("", "", "")
    lines = [f"{bold}{row}{reset}" for row in _wrapped(safe(headline(comparison), 1000), width)]
    lines.append("")
    for head, paths in (("  base  ", comparison.base), ("  new   ", comparison.new)):
        lines += textwrap.wrap(
            safe(paths, 2000), width, initial_indent=head, subsequent_indent=" " * 8, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    is_one = len(comparison.pairs) == 1
    if comparison.gates:
        lines += ["", f"{bold}{gate_sentence(comparison)}{reset}", *_gates(comparison.gates, width)]
    detailed = comparison.pairs[0] if is_one else most_changed(comparison)
    if is_one and detailed is not None:
        lines += _metrics(detailed, bold, reset, width)
    else:
        lines += _points(comparison, bold, reset)
    if detailed is not None:
        at = "" if is_one else f" at {safe(detailed.name, 60)}"
        tables = shown_tables(detailed)
        if tables:
            lines += ["", f"{bold}where the change comes from{at}{reset}"]
            lines += [line for table in tables for line in _table(table, most)]
        lines += _section("what differs", _differs(detailed, common_differs(comparison.pairs)), bold, reset, width)
        lines += _section("what could not be told", lacks(detailed), bold + dim, reset, width)
        lines += _section("to be known", detailed.notes, bold + dim, reset, width)
    for side, names in (("base", comparison.only_in_base), ("new", comparison.only_in_new)):
        if names:
            lines += _section(f"only in {side}: {plural(len(names), 'point')}", names[:most], bold, reset, width)
    return "\n".join(lines)


def _metrics(pair: Pair, bold: str, reset: str, width: int) -> list[str]:
    """The metrics of one pair, one a line; on a narrow terminal without their intervals."""
    if not pair.changes:
        return []
    cells = [("", "base", "new", "change", "95 % interval", "")]
    cells += [
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
    verdicts = ["", *(change.verdict for change in pair.changes)]
    short = [(*row[:5], verdict) for row, verdict in zip(cells, verdicts)]
    for layout in (cells, short, [(*row[:4], "", row[5]) for row in short]):
        lines = _aligned(layout, bold, reset)
        if max(map(len, lines[1:])) <= width:
            break
    return ["", *lines]


def _points(comparison: Comparison, bold: str, reset: str) -> list[str]:
    """The points of a sweep, one a line."""
    cells = [("point", "base", "new", "change", "95 % interval", "", "peak memory")]
    for pair in comparison.pairs:
        step, peak = pair.change("step_time"), pair.change("peak_memory")
        name = safe(pair.name or pair.base, _NAME)
        memory = "" if peak is None else change_text(peak)
        if step is None:
            refused = f"not comparable: {', '.join(each.what for each in pair.refused)}"
            why = refused if pair.refused else "; ".join(m.reason for m in pair.missing if m.what == "step_time")
            cells.append((name, "", "", "", "", safe(why, 60), memory))
            continue
        figures = (figure(step.base, step.unit), figure(step.new, step.unit))
        cells.append((name, *figures, change_text(step), interval_text(step), step.verdict, memory))
    return ["", *_aligned(cells, bold, reset)]


def _aligned(cells: Sequence[Sequence[str]], bold: str, reset: str) -> list[str]:
    """Rows in columns: names and verdicts to the left, figures to the right; the first row are titles."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        texts = [
            text.ljust(width) if column in (0, 5) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
            if width
        ]
        lines.append(f"  {'  '.join(texts)}".rstrip())
    return [f"{bold}{lines[0]}{reset}", *lines[1:]]


def _gates(gates: Sequence[GateResult], width: int) -> list[str]:
    """Those that did not pass first; of many that did, their number alone."""
    ordered = sorted(gates, key=lambda gate: gate.status == PASSED)
    shown = [gate for gate in ordered if gate.status != PASSED] + [g for g in ordered if g.status == PASSED][:8]
    wide = max(len(f"{gate.metric}:{100 * gate.limit_share:g}%") for gate in shown)
    lines = []
    for gate in shown:
        at = f" at {safe(gate.pair, _NAME)}" if gate.pair else ""
        share = "" if gate.share is None else f"{signed(percent(abs(gate.share)), gate.share)}, "
        limit = f"{gate.metric}:{100 * gate.limit_share:g}%{at}"
        text = f"{gate.status:<9}  {limit:<{wide}}  {share}{safe(gate.reason)}"
        lines += _wrapped(text, width, "  ", " " * 13)
    left = len(gates) - len(shown)
    return [*lines, f"  and {left} more passed"] if left else lines


def _table(table: Table, most: int) -> list[str]:
    rows = shown_rows(table, most)
    names = [_short(safe(name)) for name, *_ in rows]
    deltas = [delta_text(table, delta) for *_, delta in rows]
    levels = [f"{level_text(table, base)} → {level_text(table, new)}" for _, base, new, _ in rows]
    largest = max(abs(delta) for *_, delta in rows) or 1
    wide, long, far = (max(map(len, texts)) for texts in (names, deltas, levels))
    lines = [f"  {table_title(table)}"]
    for name, change, level, (*_, delta) in zip(names, deltas, levels, rows):
        bar = ("█" if delta > 0 else "░") * round(_BAR * abs(delta) / largest)
        lines.append(f"    {name:<{wide}}  {change:>{long}}  {level:>{far}}  {bar}".rstrip())
    return lines


def _differs(pair: Pair, common: Sequence[Differs]) -> list[str]:
    lines = [f"{each.what}: {_both(each)} (what the comparison is about)" for each in pair.allowed]
    allowed = {each.what for each in pair.allowed}
    return lines + [f"{each.what}: {_both(each)}" for each in common if each.what not in allowed]


def _both(each: Differs) -> str:
    return f"{safe(value_text(each.base), _VALUE)} → {safe(value_text(each.new), _VALUE)}"


def _section(title: str, texts: Sequence[str], bold: str, reset: str, width: int) -> list[str]:
    """A heading and what stands below it; nothing where there is nothing."""
    lines = []
    for text in texts:
        lines += _wrapped(safe(text, 600), width, "  ", "    ")
    return ["", f"{bold}{title}{reset}", *lines] if lines else []


def _short(name: str) -> str:
    """A name in so many places: long ones differ at their ends more often than at their beginnings."""
    return name if len(name) <= _NAME else f"{name[: _NAME // 3]}…{name[_NAME // 3 + 1 - _NAME :]}"


def _wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """Lines of at most that width; a number and its unit stay together."""
    kept = re.sub(r"(?<=\d) (?=%|ms\b|[KMG]iB\b)|(?<=[=<]) (?=\d)|(?<=\bp) (?=[=<])", "\u00a0", text)
    lines = textwrap.wrap(kept, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]
