"""The parts of a report as HTML. Text from a trace passes `escape`: it is never markup."""

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.document.colors import PALETTE
from stepscope.document.model import Axis, Chart, Explorer, Facts, Figure, FindingCard, Findings, Series, Table
from stepscope.formatting import cell, is_numeric, safe, scale, title_of
from stepscope.render.axes import axis_title, texts_of
from stepscope.render.csv import csv_cell, guarded
from stepscope.render.page.axes import rounded, words

NUM_ROWS, MOST_ROWS = 50, 2000  # rows that a table shows at first, and rows that the page contains at most


def escape(text: object, most: int = 10_000) -> str:
    """Return text that is safe inside an element or an attribute.

    >>> escape('<img src="x">')
    '&lt;img src=&quot;x&quot;&gt;'
    """
    return html.escape(safe(text, most))


def digest_of(text: str) -> str:
    """Return the hash by which a content security policy knows a script or a style sheet."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def with_code(text: str) -> str:
    """Return a sentence with its `code` marked up."""
    pieces = escape(text).split("`")
    if len(pieces) % 2 == 0:  # unbalanced: not ours
        return "`".join(pieces)
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


def facts_html(part: Facts) -> str:
    rows = "".join(
        f"<div><dt>{escape(row.title)}</dt><dd><span>{escape(row.value)}</span>"
        + (f"<small>{with_code(row.detail)}</small>" if row.detail else "")
        + "</dd></div>"
        for row in part.rows
    )
    title = f"<h3>{escape(part.title)}</h3>" if part.title else ""
    return f'{title}<dl class="facts">{rows}</dl>'


def chart_html(part: Chart, number: int, figure: Mapping[str, Any]) -> str:
    """Return the chart's placeholder, at its final height, below its legend."""
    caption, height = part.caption, figure["height"]
    if figure.get("left_out"):
        caption = f"{caption} {figure['left_out']:,} parts are too small to draw.".strip()
    return (
        f'<figure class="chart"><div class="head"><h3>{escape(part.title)}</h3>'
        f'<button type="button" class="quiet" data-png="{number}" data-name="{escape(part.id)}" '
        f'aria-label="Save as PNG: {escape(part.title)}">PNG</button></div>{_legend(figure)}'
        f'<div class="plot" data-chart="{number}" style="height:{height}px" role="img" '
        f'aria-label="{escape(part.title)}. {escape(part.caption)}"><noscript>This chart needs JavaScript.</noscript>'
        f"</div>" + (f"<figcaption>{with_code(caption)}</figcaption>" if caption else "") + "</figure>"
    )


def _legend(figure: Mapping[str, Any]) -> str:
    """Return the legend; its names are already escaped for Plotly."""
    if not figure["layout"].get("showlegend"):
        return ""
    items = []
    for number, trace in enumerate(figure["data"]):
        is_line = trace.get("mode") == "lines" and "stackgroup" not in trace
        color = (trace["line"] if is_line else trace["marker"])["color"]
        kind = trace["line"].get("dash", "solid") if is_line else "box"
        items.append(
            f'<button type="button" data-trace="{number}" aria-pressed="true">'
            f'<i class="{kind}" style="color:{color}"></i>{trace["name"]}</button>'
        )
    return f'<div class="legend">{"".join(items)}</div>'


def table_html(part: Table, number: int) -> str:
    """Return the first rows; `table_data` has all of them."""
    shown = min(part.num_rows, NUM_ROWS)
    return (
        f'<div class="table" data-table="{number}"><div class="head"><h3>{escape(part.title)}</h3>'
        f'<span class="tools"></span></div>{plain_table_html(part.columns, shown, True)}{_foot(part, shown)}</div>'
    )


def plain_table_html(columns: Mapping[str, Sequence[Any]], num_rows: int, is_sortable: bool = False) -> str:
    """Return the first rows of a table, without tools around it."""
    kinds = {name: ' class="figure"' if is_numeric(values) else "" for name, values in columns.items()}
    if "whole_name" in kinds:  # not on paper: some take half a page
        kinds["whole_name"] = ' class="whole"'
    heads = ""
    for column, (name, kind) in enumerate(kinds.items()):
        title = escape(title_of(name))
        title = f'<button type="button" data-column="{column}">{title}</button>' if is_sortable else title
        heads += f'<th scope="col"{kind}>{title}</th>'
    cells = [
        [f"<td{kinds[name]}>{escape(cell(name, value))}</td>" for value in values[:num_rows]]
        for name, values in columns.items()
    ]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells))
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _foot(part: Table, shown: int) -> str:
    count = f"{shown} of {part.num_rows:,} rows." if part.num_rows > shown else ""
    if part.num_rows > MOST_ROWS:
        count = f"This page has the first {MOST_ROWS:,} of {part.num_rows:,} rows. A report folder (-o DIR) has all."
    pieces = [f"<span>{with_code(text)}</span>" for text in (part.note, count) if text]
    return f'<p class="foot">{" ".join(pieces)}</p>' if pieces else ""


def table_data(part: Table) -> dict[str, Any]:
    """Return what the page sorts, filters and saves: texts, `raw` numbers, and cells that differ in CSV."""
    rows = min(part.num_rows, MOST_ROWS)
    columns = []
    for name, values in part.columns.items():
        some = list(values[:rows])
        texts, cells = [cell(name, value) for value in some], [str(csv_cell(value)) for value in some]
        column: dict[str, Any] = {"name": guarded(name), "texts": texts}
        if is_numeric(values):
            column["raw"] = cells
        else:
            column["csv"] = {row: own for row, (own, text) in enumerate(zip(cells, texts)) if own != text}
        columns.append(column)
    return {"id": part.id, "columns": columns, "rows": rows}


def explorer_data(part: Explorer) -> dict[str, Any]:
    """Plain JSON. `texts` and `values` have one entry a point."""
    return {
        "id": part.id,
        "axes": [_axis(axis) for axis in part.axes],
        "places": [list(places) for places in part.places],
        "figures": [_figure(part, figure) for figure in part.shown],
        "statuses": [safe(status) for status in part.statuses],
        "reasons": [safe(reason) for reason in part.reasons],
        "names": [safe(name) for name in part.names],
        "marks": list(part.marks),
        "noisy": list(part.is_noisy),
        "x": part.x,
        "series": part.series,
        "palette": list(PALETTE),
    }


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "title": safe(axis.name.replace("_", " ")),
        "labels": [str(v) if isinstance(v, int) else safe(cell(axis.name, v), 60) for v in axis.values],
        "values": list(axis.values) if axis.is_numeric else None,
        "is_log": axis.is_log,
    }


def _figure(part: Explorer, figure: Figure) -> dict[str, Any]:
    """`units`: those in which its points are easy to read; `unit`: which of them a point has. An axis takes that of
    the largest point on it."""
    values = part.figures[figure.name]
    low, high = (part.figures[name] if name is not None else () for name in (figure.low, figure.high))
    scales = [scale(figure.name, value or 0.0) for value in values]
    units = list(dict.fromkeys(scales))
    titles = [words(axis_title(figure.name, unit.unit), 80) for unit in units]
    return {
        "title": title_of(figure.name),
        "units": [{"divisor": unit.divisor, "axis": title} for unit, title in zip(units, titles)],
        "unit": [units.index(one) for one in scales],
        "is_log": figure.is_log,
        "values": rounded(values),
        "low": rounded(low) if low else None,
        "high": rounded(high) if high else None,
        "cells": [cell(figure.name, value) for value in values],
        "texts": texts_of(figure.name, Series("", values, low=low, high=high)),
    }


NUM_EVIDENCE_ROWS = 20


def findings_html(part: Findings, has_timeline: bool) -> str:
    warnings = "".join(f'<p class="note">Note: {escape(warning)}.</p>' for warning in part.warnings)
    cards = "".join(_card(card, has_timeline) for card in part.cards)
    cards = cards or f'<p class="none">{with_code(part.summary)}</p>'
    return f"<h3>Findings</h3>{warnings}<div class='findings'>{cards}</div>{_checked(part)}"


def _card(card: FindingCard, has_timeline: bool) -> str:
    code, plain = "<pre><code>{}</code></pre>", "<p>{}</p>"
    rows = (("fix", code, card.fix), ("same fix", plain, card.shared), ("prove it", code, card.prove),
            ("derived from", plain, card.derived), ("how to check", plain, card.falsified_by))  # fmt: skip
    body = "".join(f"<dt>{title}</dt><dd>{form.format(escape(text))}</dd>" for title, form, text in rows if text)
    evidence = "".join(map(_evidence, card.tables))
    button = ""
    if card.places and has_timeline:
        spans = " ".join(f"{start}-{end}" for start, end in card.places)
        button = f'<button type="button" class="go" data-places="{spans}">Show on the timeline</button>'
    return (
        f'<article class="finding" id="finding-{escape(card.id)}"><div class="saving"><b>{escape(card.saving)}</b>'
        f"<span>saved {escape(card.saving_of)}</span>{button}</div><div class='what'>"
        f"<h4>{escape(card.id.replace('_', ' '))}"
        f'<span class="confidence" title="How certain the saving is">{escape(card.confidence)} confidence</span></h4>'
        f"<p>{escape(card.sentence)}</p><dl>{body}</dl>"
        + (f"<details><summary>Evidence</summary>{evidence}</details>" if evidence else "")
        + "</div></article>"
    )


def _evidence(table: Table) -> str:
    num_rows = min(table.num_rows, NUM_EVIDENCE_ROWS)
    columns = {name: values[:num_rows] for name, values in table.columns.items()}
    more = table.num_rows - num_rows
    note = f'<p class="foot">{more:,} more rows in <code>stepscope diagnose --json</code></p>' if more else ""
    return f"<h5>{escape(table.title)}</h5>{plain_table_html(columns, num_rows)}{note}"


def _checked(part: Findings) -> str:
    blocks = []
    if part.passed:
        names = ", ".join(escape(name.replace("_", " ")) for name in part.passed)
        blocks.append(f"<details><summary>{len(part.passed)} checks passed</summary><p>{names}</p></details>")
    if part.unchecked:
        rows = "".join(
            f"<dt>{with_code(reason)}</dt><dd>{escape(', '.join(ids).replace('_', ' '))}</dd>"
            for reason, ids in part.unchecked
        )
        title = f"{sum(len(ids) for _, ids in part.unchecked)} checks could not run"
        blocks.append(f"<details><summary>{title}</summary><dl>{rows}</dl></details>")
    if part.suppressed:
        blocks.append(f"<p>Ignored: {escape(', '.join(part.suppressed))}.</p>")
    return f'<div class="checked">{"".join(blocks)}</div>' if blocks else ""
