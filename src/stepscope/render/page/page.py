"""Renders a report as one HTML file that needs no network, no server and no other file.

Its content security policy allows only the scripts in it, by their hashes: no request can leave the page, and markup
hidden in a name cannot run. Plotly is compressed, and decompressed when the first chart comes into view.
"""

import base64
import gzip
import importlib.util
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from stepscope.document import model
from stepscope.document.model import Document, Section, Timeline
from stepscope.formatting import heading
from stepscope.render.files import missing
from stepscope.render.page import elements
from stepscope.render.page.elements import digest_of, escape, findings_html, with_code
from stepscope.render.page.plotly_charts import figure_of

_HERE = Path(__file__).parent
_SCRIPTS = ("blobs.js", "sections.js", "tables.js", "charts.js", "explorer.js", "page.js")
_TIMELINE = ("timeline_data.js", "timeline_draw.js", "timeline_details.js", "timeline_move.js", "timeline.js")


def page_of(report: Document, is_framed: bool = False) -> str:
    """Return the page; in a frame of another page, without the list of sections beside them."""
    body = _Body(report)
    pool = ThreadPoolExecutor(1)
    packing = pool.submit(lambda: _packed(_plotly()))  # beside the rest, which needs Python: this does not
    pool.shutdown(wait=False)
    sections = "".join(body.section(section) for section in report.sections)
    sources = ["".join(map(_asset, names)) for names in (_SCRIPTS, _TIMELINE)]
    scripts = [_asset("early.js"), *(f'(() => {{\n"use strict";\n{source}}})();' for source in sources)]
    plotly = _plotly() if body.data["charts"] or body.data["explorers"] else ""
    policy = _policy([*scripts, plotly] if plotly else scripts)
    facts = " · ".join(f"{escape(name)} {escape(value)}" for name, value in report.facts.items())
    return "".join([
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
        f"<title>{escape(report.title, 200)} · stepscope</title>",
        f"<style>{_asset('page.css')}</style>",
        f"<script>{scripts[0]}</script></head>\n<body{' class=framed' if is_framed else ''}>",
        _bar(report),
        f'<main><p class="verdict">{with_code(report.verdict)}</p>{sections}',
        f'<footer><p>{facts}</p></footer></main>\n',
        f"<script>{scripts[1]}</script>\n",
        f'<script type="application/json" id="data">{_json(body.data)}</script>\n',
        *body.blobs,
        f"<script>{scripts[2]}</script>\n",
        f'<script type="application/octet-stream" id="plotly-blob">{packing.result()}</script>\n' if plotly else "",
        "</body></html>\n",
    ])  # fmt: skip


class _Body:
    def __init__(self, report: Document) -> None:
        self.data: dict[str, Any] = {"tables": [], "charts": [], "explorers": [], "timeline": None}
        self.blobs: list[str] = []
        self.has_timeline = bool(report.parts(Timeline))

    def section(self, section: Section) -> str:
        content = "".join(self._part(part) for part in section.parts)
        name, title = escape(section.id), f'<h2 id="{escape(section.id)}-title">{escape(section.title)}</h2>'
        return f'<section id="{name}" aria-labelledby="{name}-title">{title}{content}</section>'

    def _part(self, part: Any) -> str:
        match part:
            case model.Table():
                return elements.table_html(part, self._number("tables", elements.table_data(part)))
            case model.Chart():
                figure = figure_of(part)
                return elements.chart_html(part, self._number("charts", figure), figure)
            case model.Facts():
                return elements.facts_html(part)
            case model.Text():
                return f"<p>{with_code(part.text)}</p>"
            case model.Missing():
                return f'<aside class="missing"><p>{with_code(heading(part.text))}</p></aside>'
            case model.Findings():
                return findings_html(part, self.has_timeline)
            case Timeline():
                return self._timeline(part)
            case model.Explorer():
                number = self._number("explorers", elements.explorer_data(part))
                return f'<div class="explorer" data-explorer="{number}"></div>'
        raise TypeError(f"no HTML for {type(part).__name__}")

    def _number(self, kind: str, data: dict[str, Any]) -> int:
        """Add data for the scripts, and return its place."""
        self.data[kind].append(data)
        return len(self.data[kind]) - 1

    def _timeline(self, part: Timeline) -> str:
        self.data["timeline"] = part.meta
        blob = base64.b64encode(part.blob).decode()
        self.blobs.append(f'<script type="application/octet-stream" id="timeline-blob">{blob}</script>\n')
        wait = '<p class="wait">The timeline is drawn when you open this section.</p>'
        return f'<div class="timeline" id="timeline-root">{wait}</div>'


def _bar(report: Document) -> str:
    links = ""
    for section in report.sections:
        is_absent = all(isinstance(part, model.Missing) for part in section.parts)
        kind = ' class="absent"' if is_absent else ""
        links += f'<a href="#{escape(section.id)}"{kind}>{escape(section.title)}</a>'
    return (
        f'<header class="bar"><h1 title="{escape(report.title)}">{escape(report.title, 200)}</h1>'
        f'<nav aria-label="Sections">{links}</nav>'
        '<div class="tools"><button type="button" class="quiet" id="theme">Dark</button>'
        '<button type="button" class="quiet" id="help" aria-label="Keyboard shortcuts">?</button></div></header>'
        '<dialog id="keys"><h3>Keyboard shortcuts</h3><dl><dt>1 … 9, 0</dt><dd>go to a section</dd>'
        "<dt>[ &nbsp; ]</dt><dd>previous, next section</dd><dt>t</dt><dd>light or dark theme</dd>"
        "<dt>?</dt><dd>this help</dd></dl>"
        '<button type="button" class="quiet">Close</button></dialog>'
    )


def _json(value: Any) -> str:
    """Return JSON without `<`, `>` and `&`, so that no `</script>` can end it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    text = (_HERE / name).read_text(encoding="utf-8")
    return text if name.endswith(".js") else re.sub(r"/\*.*?\*/|^\s+", "", text, flags=re.S | re.M)


@cache
def _plotly() -> str:
    """Return Plotly's JavaScript from its Python package, without importing it."""
    found = importlib.util.find_spec("plotly")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    for folder in folders:
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path.read_bytes().decode("utf-8")
    raise missing("plotly")


@cache
def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _policy(scripts: list[str]) -> str:
    """Return a content security policy: nothing is fetched, and only these scripts run."""
    hashes = " ".join(f"'{digest_of(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
