"""Renders a document that changes as a page which fetches its parts again and again, from where it came from.

Every text in it passes `escape`. Besides, its content security policy allows only one script and one style sheet, by
their hashes, and requests to its own server.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from stepscope.document import model
from stepscope.document.model import Bars, Document, Part, Series, Table, Trend, Trends
from stepscope.formatting import cell, percent, title_of
from stepscope.render.axes import finite
from stepscope.render.colors import colors_of
from stepscope.render.page.elements import digest_of, escape, facts_html, plain_table_html, with_code

_HERE = Path(__file__).parent
_WIDTH, _HEIGHT = 240.0, 48.0


def live_page(document: Document, every_s: float) -> str:
    """Return the page with the document in it; its script asks for `state` every so many seconds."""
    parts = "".join(f'<div id="{name}">{html}</div>' for name, html in _parts(document))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(document.title, 200)} · stepscope</title><style>{_style()}</style></head>\n"
        f'<body class="live" data-every="{every_s:g}"><header><h1>{escape(document.title, 400)}</h1>'
        '<p><span id="read"></span> '
        '<button type="button" class="quiet" id="pause" aria-pressed="false">Pause</button> '
        '<button type="button" class="quiet" id="theme">Dark</button></p></header>\n'
        f'<main><p class="verdict" id="verdict" role="status">{with_code(document.verdict)}</p>'
        f'<div id="parts">{parts}</div></main>\n<script>{_script()}</script></body></html>\n'
    )


def live_state(document: Document, is_over: bool) -> str:
    """Return what the page fetches: the parts by name, as JSON."""
    state = {"verdict": with_code(document.verdict), "parts": dict(_parts(document)), "is_over": is_over}
    return json.dumps(state, allow_nan=False)


def live_policy() -> str:
    """Return the content security policy, for the page's header."""
    return (
        f"default-src 'none'; script-src '{digest_of(_script())}'; style-src '{digest_of(_style())}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _parts(document: Document) -> Iterator[tuple[str, str]]:
    """Yield a name and the HTML of every part; a part keeps its name while the document changes."""
    for section in document.sections:
        for part in section.parts:
            kind = type(part).__name__.lower()
            yield f"{kind}-{escape(getattr(part, 'id', ''), 40)}", _html(part)


def _html(part: Part) -> str:
    match part:
        case model.Notes():
            rows = "".join(f"<li>{with_code(row)}</li>" for row in part.rows)
            return f'<ul class="notes" role="status" aria-label="Warnings">{rows}</ul>'
        case Trends():
            cards = "".join(_trend(row, part.span) for row in part.rows)
            return f'<h2 class="span">Since the first step: {escape(part.span)}</h2><div class="trends">{cards}</div>'
        case model.Facts():
            return facts_html(part)
        case model.Text():
            return f"<p>{with_code(part.text)}</p>"
        case Bars():
            return _bars(part)
        case Table():
            table = plain_table_html(part.columns, part.num_rows)
            return f'<div class="table"><div class="head"><h2>{escape(part.title)}</h2></div>{table}</div>'
    raise TypeError(f"no HTML for {type(part).__name__}")


def _trend(row: Trend, span: str) -> str:
    """Return a figure with its line; a screen reader hears where it began, its range and where it is."""
    known = finite(row.y)
    ends = " to ".join(dict.fromkeys(cell(row.name, end) for end in (min(known), max(known)))) if known else "unknown"
    said = f"{row.title} in {span}: {ends}. Now {row.value}"
    detail = f"<span>{escape(row.detail)}</span>" if row.detail else ""
    return (
        f"<figure><figcaption><h2>{escape(row.title)}</h2><b>{escape(row.value)}</b></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(said)}">{"".join(_lines(row.y, row.from_zero))}</svg>'
        f'<p class="ends"><span>{escape(ends)}</span>{detail}</p></figure>'
    )


def _lines(values: Sequence[float | None], from_zero: bool) -> Iterator[str]:
    """Yield a line and the area below it for every stretch of known values."""
    known = finite(values)
    if not known:
        return
    low, high = min([*known, 0.0] if from_zero else known), max(known)
    scale = (_HEIGHT - 4) / (high - low) if high > low else 0.0
    for stretch in _stretches(values):
        width = _WIDTH / max(1, len(values) - 1)
        points = [(at * width, _HEIGHT - 2 - (y - low) * scale if scale else _HEIGHT / 2) for at, y in stretch]
        if len(points) == 1:
            points = [(max(0.0, points[0][0] - width / 2), points[0][1]), (points[0][0] + width / 2, points[0][1])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polygon points="{points[0][0]:.1f},{_HEIGHT:g} {path} {points[-1][0]:.1f},{_HEIGHT:g}"/>'
        yield f'<polyline points="{path}" vector-effect="non-scaling-stroke"/>'


def _stretches(values: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    for is_known, stretch in groupby(enumerate(values), key=lambda each: bool(finite([each[1]]))):
        if is_known:
            yield [(at, value or 0.0) for at, value in stretch]


def _bars(part: Bars) -> str:
    values = [value or 0.0 for value in part.series[0].y]
    whole = part.whole or sum(values) or 1.0
    colors = colors_of(tuple(Series(label, (), color=label) for label in part.labels))
    rows = ""
    for label, value, color in zip(part.labels, values, colors):
        share = min(1.0, max(0.0, value / whole))
        rows += (
            f'<tr><th scope="row">{escape(label)}</th><td class="figure">{escape(cell(part.unit, value))}</td>'
            f'<td class="figure">{percent(share)}</td><td class="share"><svg viewBox="0 0 100 10" '
            f'preserveAspectRatio="none" aria-hidden="true"><rect width="{100 * share:.2f}" height="10" '
            f'fill="{color}"/></svg></td></tr>'
        )
    head = f'<tr><th scope="col">part</th><th scope="col" class="figure">{escape(title_of(part.unit))}</th>'
    head += '<th scope="col" class="figure">share</th><td></td></tr>'
    return (
        f'<div class="table parts"><div class="head"><h2>{escape(part.title)}</h2></div><div class="scroll"><table>'
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></div></div>"
    )


@cache
def _style() -> str:
    return "".join((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "live.css"))


@cache
def _script() -> str:
    return (_HERE / "live.js").read_text(encoding="utf-8")
