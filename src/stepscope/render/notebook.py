"""Renders a document for a notebook: the verdict, the first tables, the timeline, and the whole text folded away.

It has no scripts and no colors, so it looks like the notebook around it. A timeline needs scripts: it is a page of
its own, in a frame that can neither reach the notebook nor the network.
"""

import html
from collections.abc import Iterator, Sequence
from itertools import islice

from stepscope.document.model import Bars, Document, Facts, Findings, Lines, Part, Section, Table, Timeline
from stepscope.formatting import cell, heading, is_numeric, safe, title_of
from stepscope.render.svg import svg_of
from stepscope.render.terminal import terminal_text

NUM_ROWS, NUM_TABLES = 8, 4
_LONGEST = 1000
_FRAME_HEIGHT = "36em"
_NAME = "text-align:left;min-width:11em;max-width:40em;overflow-wrap:break-word"
_FIGURE = "text-align:right;white-space:nowrap"


def html_of(document: Document) -> str:
    """Return the document as HTML without scripts, styles of its own or links; a timeline is in a frame."""
    parts = [part for section in document.sections for part in section.parts if not part.page_only]
    tables = "".join(islice((_table(*grid) for part in parts for grid in _grids(part)), NUM_TABLES))
    tables += "".join(f"<div>{svg_of(part)}</div>" for part in parts if isinstance(part, Lines))
    with_timeline = [each for each in document.sections if any(isinstance(part, Timeline) for part in each.parts)]
    tables += "".join(_frame(document, section) for section in with_timeline)
    text = html.escape(terminal_text(document, width=100))
    whole = f"<details><summary>Full text</summary><pre>{text}</pre></details>"
    return f"<div><p><b>{_escaped(document.verdict)}</b></p>{tables}{whole}</div>"


def _frame(document: Document, section: Section) -> str:
    from stepscope.render.page.page import page_of  # only here: without a timeline it is not needed

    page = html.escape(page_of(Document(document.title, "", (section,)), is_framed=True))
    style = f"width:100%;height:{_FRAME_HEIGHT};border:0"
    return f'<iframe sandbox="allow-scripts" title="timeline" style="{style}" srcdoc="{page}"></iframe>'


Grid = tuple[str, Sequence[str], Sequence[Sequence[str]], Sequence[bool]]
"""Title, header, rows, and which columns are figures."""


def _grids(part: Part) -> Iterator[Grid]:
    match part:
        case Facts() if part.rows:
            facts = [(fact.title, fact.value, fact.detail) for fact in part.rows]
            yield part.title, (), facts, [False] * 3
        case Findings() if part.cards:
            savings = [f"{card.saving} {card.saving_of}".strip() for card in part.cards]
            rows = [(card.id, saving, card.sentence, card.fix) for card, saving in zip(part.cards, savings)]
            yield "", ("finding", "saves", "why", "fix"), rows, [False] * 4
        case Table() if part.num_rows:
            names = [name for name in part.screen if name in part.columns] or list(part.columns)
            cells = [[cell(name, value) for value in part.columns[name][:NUM_ROWS]] for name in names]
            figures = [is_numeric(part.columns[name]) for name in names]
            more = f" (first {NUM_ROWS} of {part.num_rows:,} rows)" if part.num_rows > NUM_ROWS else ""
            yield part.title + more, [title_of(name) for name in names], list(zip(*cells)), figures
        case Bars():
            names = [series.name for series in part.series]
            values = [[cell(part.unit, value) for value in series.y] for series in part.series]
            yield part.title, ("", *names), list(zip(part.labels, *values)), [False, *(True for _ in names)]


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[bool]) -> str:
    styles = [_FIGURE if is_figure else _NAME for is_figure in figures]
    head = "".join(f"<th style='{style}'>{_escaped(text)}</th>" for style, text in zip(styles, header))
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = "".join(
        "<tr>" + "".join(f"<td style='{style}'>{_escaped(text)}</td>" for style, text in zip(styles, row)) + "</tr>"
        for row in rows
    )
    above = f"<p><b>{_escaped(heading(title))}</b></p>" if title else ""
    return f"{above}<table style='margin:0 0 1em 0'>{head}<tbody>{body}</tbody></table>"


def _escaped(text: object) -> str:
    return html.escape(safe(text, _LONGEST))
