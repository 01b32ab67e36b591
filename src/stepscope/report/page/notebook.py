"""A report inside a notebook: its verdict, its findings and the key tables, as plain HTML without a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.report.page.elements import escape, plain_table_html, with_code
from stepscope.report.page.finding_cards import saving_of
from stepscope.report.parts import Facts, Findings, Report, Table

_NUM_ROWS, _NUM_TABLES = 8, 3


def notebook_html(report: Report) -> str:
    """What a cell shows; `.save("report.html")` has the rest."""
    parts = report.sections[0].parts if report.sections else ()
    tables = [table for table in report.parts(Table) if table.num_rows][:_NUM_TABLES]
    return "".join([
        f"<p><b>{with_code(report.verdict)}</b></p>",
        *(_facts(part) for part in parts if isinstance(part, Facts) and not part.title),
        *(piece for part in report.parts(Findings) for piece in _findings(part)),
        *(_table(table) for table in tables),
        f"<p style='opacity:.7'>{escape(report.title)}: <code>.save('report.html')</code> writes the whole page.</p>",
    ])  # fmt: skip


def _facts(part: Facts) -> str:
    rows = "".join(
        f"<tr><td>{escape(row.title)}</td><td>{escape(row.value)}</td>"
        f"<td style='opacity:.7'>{with_code(row.detail)}</td></tr>"
        for row in part.rows
    )
    return f"<table>{rows}</table>"


def _findings(part: Findings) -> Iterator[str]:
    for finding in part.diagnosis.findings:
        saving, detail = saving_of(finding, part.diagnosis.step_ns)
        yield (
            f"<p><b>{escape(saving)}</b> {escape(detail)}: {escape(finding.sentence)}<br>"
            f"<code>{escape(finding.fix)}</code></p>"
        )


def _table(table: Table) -> str:
    rows = min(_NUM_ROWS, table.num_rows)
    columns: dict[str, Any] = {name: values[:rows] for name, values in table.columns.items()}
    more = f", the first {rows} of {table.num_rows:,} rows" if table.num_rows > rows else ""
    return f"<p><b>{escape(table.title)}</b>{more}</p>{plain_table_html(columns, rows)}"
