"""Results in a notebook: the verdict, the tables that matter most, and the whole text folded away.

The results live in `analysis/` and `findings/`, which know nothing of pages. So a class learns to show itself where
its results leave the house: `with_html` gives it a `_repr_html_`. Figures are written by the functions that write
them for the terminal. There is no script and no color in it: it looks like the notebook around it.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.formatting import average, duration, percent, safe, size

if TYPE_CHECKING:
    from stepscope.analysis.comparison.gates import Comparison
    from stepscope.analysis.comparison.sweeps import SweepSummary
    from stepscope.analysis.ranks.all_ranks import Analysis
    from stepscope.document.model import Document, Table
    from stepscope.findings.diagnose import Diagnosis
    from stepscope.findings.what_if import WhatIf
    from stepscope.session.memory_view import MemoryAnalysis

NUM_ROWS, NUM_TABLES = 8, 3
_LONGEST = 300
_HEAD = "text-align:left"
_NAME = "text-align:left;min-width:11em;max-width:40em;overflow-wrap:break-word"
_FIGURE = "text-align:right;white-space:nowrap"
_SENTENCE = "text-align:left;white-space:normal;min-width:20em"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Grid:
    """A table of texts; the first column names the row."""

    titles: Sequence[str]
    """None where the rows say it all."""
    rows: Sequence[Sequence[str]]
    sentences: frozenset[int] = frozenset()
    """Columns that are text, not figures."""
    names: frozenset[int] = frozenset((0,))
    """Columns that are names: short texts."""
    title: str = ""
    """"" where the first column's says it."""


def with_html(result: Result) -> Result:
    """The result, which a notebook shows as tables from now on."""
    type(result)._repr_html_ = html_of  # type: ignore[attr-defined]
    return result


def html_of(result: object) -> str:
    """A result as HTML."""
    headline, grids, text = _PAGES[type(result).__name__](result)
    tables = "".join(_table(grid) for grid in grids if grid.rows)
    whole = f"<details><summary>all of it, as text</summary><pre>{html.escape(text)}</pre></details>"
    if "\n" not in text:
        whole = f"<p>{_escaped(text, 2000)}</p>"
    return f"<div><p><b>{_escaped(headline, 2000)}</b></p>{tables}{whole}</div>"


def _escaped(text: object, most: int = _LONGEST) -> str:
    return html.escape(safe(text, most))


def _table(grid: Grid) -> str:
    def style(column: int) -> str:
        return _NAME if column in grid.names else _SENTENCE if column in grid.sentences else _FIGURE

    head = "".join(
        f"<th style='{style(column) if column else _HEAD}'>{_escaped(title)}</th>"
        for column, title in enumerate(grid.titles)
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td style='{style(i)}'>{_escaped(cell, 1000)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in grid.rows
    )
    title = f"<p><b>{_escaped(grid.title)}</b></p>" if grid.title else ""
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"{title}<table style='margin:0 0 1em 0'>{head}<tbody>{rows}</tbody></table>"


Page = tuple[str, Iterator[Grid], str]


def _analysis(analysis: Analysis) -> Page:
    from stepscope.document.text.trace_text import analysis_text
    from stepscope.document.trace_verdict import trace_verdict

    return trace_verdict(analysis.ranks[0]), _analysis_grids(analysis), analysis_text(analysis, NUM_ROWS)


def _analysis_grids(analysis: Analysis) -> Iterator[Grid]:
    from stepscope.analysis.time.phases import UNATTRIBUTED
    from stepscope.document.kernel_names import kernel_titles

    first = analysis.ranks[0]
    num_steps, has_gpu = max(1, first.steps.height), bool(first.gpu_time.window_ns)
    titles = ["where a step goes" if first.steps.height else "where the time goes", "host", "of it"]
    rows = []
    for phase, host_ns, share, device_ns, num_kernels in first.phases.iter_rows():
        if phase != UNATTRIBUTED:
            figures = [duration(device_ns / num_steps), average(num_kernels / num_steps)] if has_gpu else []
            rows.append([phase, duration(host_ns / num_steps), percent(share), *figures])
    yield Grid([*titles, "GPU work", "kernels"] if has_gpu else titles, rows)
    idle = first.idle_causes.filter(first.idle_causes["total_ns"] > 0).sort("total_ns", descending=True)
    if has_gpu and first.gpu_time.idle_ns:
        rows = [[row["cause"], duration(row["total_ns"]), percent(row["share"])] for row in idle.to_dicts()]
        yield Grid(["why the GPU was idle", "time", "of idle time"], rows)
    kernels = first.top_kernels.head(NUM_ROWS).to_dicts()
    names = kernel_titles([row["name"] or "" for row in kernels])
    rows = [
        [name, f"{row['num_calls']:,}", duration(row["mean_ns"], 3), duration(row["total_ns"]), percent(row["share"])]
        for name, row in zip(names, kernels)
    ]
    yield Grid(["kernels", "calls", "mean", "total", "of GPU work"], rows)


def _diagnosis(diagnosis: Diagnosis) -> Page:
    from stepscope.document.text.findings_text import diagnosis_text

    step = "How long a step takes is not known."
    if diagnosis.step_ns is not None:
        step = f"A step takes {duration(diagnosis.step_ns, 3)}."
    return f"{step} {diagnosis.binds}", _finding_grids(diagnosis), diagnosis_text(diagnosis, False, 100)


def _finding_grids(diagnosis: Diagnosis) -> Iterator[Grid]:
    from stepscope.document.text.findings_text import saving_of

    rows = []
    for finding in diagnosis.findings:
        saving = saving_of(finding)
        figures = [f"{saving.most}{text}" if text else "–" for text in (saving.time, saving.memory)]
        rows.append([finding.id, *figures, finding.sentence, finding.fix])
    yield Grid(["finding", "saves a step", "of the peak", "what is wrong", "fix"], rows, frozenset((3, 4)))


def _what_if(answer: WhatIf) -> Page:
    from stepscope.document.text.whatif_text import whatif_text

    text = whatif_text(answer)
    replays = [("in the trace", answer.traced), ("replayed", answer.before)]
    replays += [("changed", answer.after)] if answer.is_changed else []
    rows = [
        [name, *(duration(ns, 4) for ns in (one.step_ns, one.done_ns, one.device_ns, one.host_ns))]
        for name, one in replays
    ]
    titles = ["", "step", "until the GPU is done", "GPU work", "host's own time"]
    return text.splitlines()[-1], iter([Grid(titles, rows)]), text


def _comparison(comparison: Comparison) -> Page:
    from stepscope.document.text.compare_text import compare_text
    from stepscope.document.text.compare_words import headline

    return headline(comparison), _comparison_grids(comparison), compare_text(comparison, NUM_ROWS)


def _comparison_grids(comparison: Comparison) -> Iterator[Grid]:
    from stepscope.document.text import compare_words as words

    titles = ["base", "new", "change", "95 % interval", "verdict"]
    is_one = len(comparison.pairs) == 1
    changes = [
        (words.title_of(change.metric) if is_one else pair.name or pair.base, change)
        for pair in comparison.pairs
        for change in pair.changes
        if is_one or change.metric == "step_time"
    ]
    rows = []
    for name, change in changes:
        figures = [words.figure(value, change.unit) for value in (change.base, change.new)]
        verdict = words.verdict_text(change) if is_one else change.verdict
        rows.append([name, *figures, words.change_text(change), words.interval_text(change), verdict])
    yield Grid(["" if is_one else "point", *titles], rows, frozenset((5,)))
    detailed = comparison.pairs[0] if is_one else words.most_changed(comparison)
    for table in words.shown_tables(detailed) if detailed is not None else ():
        rows = [
            [name, words.level_text(table, base), words.level_text(table, new), words.delta_text(table, delta)]
            for name, base, new, delta in words.shown_rows(table, NUM_ROWS)
        ]
        yield Grid([words.table_title(table), "base", "new", "change"], rows)


def _memory(analysis: MemoryAnalysis) -> Page:
    from stepscope.document.text.memory_text import leak_sentence, memory_text, memory_verdict

    report = analysis.reports[0]
    leak = f"{leak_sentence(report.account)} " if report.account.left_alive else ""
    return leak + memory_verdict(report), _memory_grids(analysis), memory_text(analysis, NUM_ROWS)


def _memory_grids(analysis: MemoryAnalysis) -> Iterator[Grid]:
    from stepscope.analysis.memory.account import REMAINDER
    from stepscope.document.memory_facts import in_words
    from stepscope.session.memory_view import SNAPSHOT

    report = analysis.reports[0]
    live = report.account.live_at_peak
    titles = ["live at the peak", "size", "of the peak"]
    by_owner = [part for part in live.by_owner if part.name not in (None, REMAINDER)]
    if by_owner and report.source != SNAPSHOT:
        rows = [[in_words(part.name), size(part.bytes), percent(part.share)] for part in live.by_owner]
        yield Grid(titles, rows)
    for what, parts in (("op", live.by_op), ("place in Python", live.by_caller)):
        known = [part for part in parts if part.name not in (None, REMAINDER)][:NUM_ROWS]
        if known and (what == "op") != (report.source == SNAPSHOT):
            rows = [[part.name or "", size(part.bytes), percent(part.share)] for part in known]
            yield Grid([f"live at the peak, by {what}", *titles[1:]], rows)


def _sweep(sweep: SweepSummary) -> Page:
    from stepscope.document.text.sweeps import sweep_text

    counts = ", ".join(f"{number} {status}" for status, number in sweep.num_by_status.items())
    return f"{len(sweep.points)} rows: {counts}", _sweep_grids(sweep), sweep_text(sweep, 160)


def _sweep_grids(sweep: SweepSummary) -> Iterator[Grid]:
    from stepscope.document.text.sweeps import COLUMNS

    told = [column for column in COLUMNS if any(column.text(point) for point in sweep.points)]
    axes = list(sweep.varying)
    rows = [
        [
            *(str(point.axes.get(name, "")) for name in axes),
            *(column.text(point) or "" for column in told),
            point.status,
        ]
        for point in sweep.points
    ]
    yield Grid([*axes, *(column.title for column in told), "status"], rows)


def _report(report: Document) -> Page:
    where = f"{safe(report.title)}: .save('report.html') writes the whole page"
    return report.verdict, _report_grids(report), where


def _report_grids(report: Document) -> Iterator[Grid]:
    """The first facts, the findings, the first tables."""
    from stepscope.document.model import Facts, Findings, Table

    for part in report.sections[0].parts if report.sections else ():
        if isinstance(part, Facts) and not part.title:
            rows = [[fact.title, fact.value, fact.detail] for fact in part.rows]
            yield Grid((), rows, frozenset((1, 2)))
    for part in report.parts(Findings):
        yield from _finding_grids(part.diagnosis)
    yield from map(_table_grid, [table for table in report.parts(Table) if table.num_rows][:NUM_TABLES])


def _table_grid(table: Table) -> Grid:
    from stepscope.formatting import cell, is_numeric, title_of

    num_rows = min(NUM_ROWS, table.num_rows)
    columns = [[cell(name, value) for value in values[:num_rows]] for name, values in table.columns.items()]
    names = {0, *(place for place, values in enumerate(table.columns.values()) if not is_numeric(values))}
    more = f", the first {num_rows} of {table.num_rows:,} rows" if table.num_rows > num_rows else ""
    titles = [title_of(name) for name in table.columns]
    return Grid(titles, list(zip(*columns)), names=frozenset(names), title=f"{safe(table.title)}{more}")


_PAGES: dict[str, Callable[[Any], Page]] = {
    "Analysis": _analysis,
    "Diagnosis": _diagnosis,
    "WhatIf": _what_if,
    "Comparison": _comparison,
    "MemoryAnalysis": _memory,
    "SweepSummary": _sweep,
    "Document": _report,
}
"""By the name of the result's class: to look it up must not import what it is made of."""
