"""Names that somebody else may have given, and a report with them in every place."""

from __future__ import annotations

from stepscope.document.findings import findings_part
from stepscope.document.model import (
    Bars,
    Document,
    Dot,
    Fact,
    Facts,
    Heat,
    Lines,
    Mark,
    Missing,
    Node,
    Scatter,
    Section,
    Series,
    Table,
    Text,
    Tree,
)
from stepscope.findings.diagnose import Diagnosis, Unchecked
from stepscope.findings.finding import Evidence, Finding

NAMES = (
    "<script>alert(1)</script>",
    "</script></details><img src=x onerror=alert(1)>",
    "\"quoted\" & 'single'",
    "two\nlines\r\n\tand a tab",
    "\u202eesrever\u200f \u2066x",
    "\x1b[31mred\x1b[0m \x9b2J \x00",
    '=HYPERLINK("http://evil.example","x")',
    "+1+1",
    "-2+3+cmd|' /C calc'!A0",
    "@SUM(A1:A9)",
    "\t=1+1",
    "\r=1+1",
    "  =1+1",
    '"=1+1',
    "＝1+1",
    "＠SUM(A1)",
    "a;=1+1",
    "$\\frac{$ and $x^2$",
    "_hidden",
    "a|b `c` [d](http://evil.example) *e* ~f~ ![g](http://evil.example/h.png)",
    "@octocat see #123 and GH-12 or www.evil.example",
    "漢字 😀 \U0001f468\u200d\U0001f469",
    "half a sign \ud800",
    "# heading\n- item\n1. item",
    "x" * 10_000,
    "",
)


def charts(names: tuple[str, ...] = NAMES) -> list:
    numbers = [float(number) for number in range(1, len(names) + 1)]
    nodes = [Node("root", "", names[0], sum(numbers))]
    nodes += [Node(f"n{at}", "root", name, number) for at, (name, number) in enumerate(zip(names, numbers))]
    nodes += [Node(f"m{at}", f"n{at}", name, number / 2) for at, (name, number) in enumerate(zip(names, numbers))]
    series = tuple(
        Series(name, [number, None, 3 * number], [1.0, 2.0, 4.0], None, [number * 0.9, None, number],
               [number * 1.1, None, number * 4], ["", name[:12], ""]) for name, number in zip(names[:6], numbers)
    )  # fmt: skip
    common = {"caption": " ".join(names)}
    return [
        Bars(id="bars", title=names[0], labels=names, series=(Series(names[1], numbers),), unit="total_ns", **common),
        Bars(id="stacked", title=names[1], labels=names[:4], unit="share",
             series=tuple(Series(name, [0.3] * 4) for name in names[:3]), **common),
        Lines(id="lines", title=names[2], x="seq_len", y="time_ns", series=series, log_x=True, log_y=True, **common),
        Lines(id="areas", title=names[3], x="time_ns", y="live_bytes", style="areas",
              series=tuple(Series(name, numbers, numbers) for name in names[:4]),
              marks=tuple(Mark(number, name) for name, number in zip(names, numbers)), **common),
        Lines(id="steps", title=names[4], x=names[0], y=names[1], style="steps", series=series, **common),
        Lines(id="dots", title=names[5], x="num_x", y="loss", style="dots", series=series, **common),
        Scatter(id="scatter", title=names[6], x="flops_per_byte", y="flops_per_s", **common,
                points=tuple(Dot(n * 10, n * 1e12, 0.02, name, name) for name, n in zip(names, numbers)),
                limits=(Series(names[8], [1e12, 1e15], [1.0, 1000.0]),)),
        Tree(id="icicle", title=names[7], shape="icicle", unit="total_ns", nodes=tuple(nodes), **common),
        Tree(id="treemap", title=names[8], shape="treemap", unit="live_bytes", nodes=tuple(nodes), **common),
        Heat(id="heat", title=names[9], x_title=names[0], y_title=names[1], x_labels=names, y_labels=names[:2],
             unit="peak_bytes", values=[numbers, [None] * len(names)], texts=[names] * 2, **common),
    ]  # fmt: skip


def report(names: tuple[str, ...] = NAMES, num_rows: int = 1, num_findings: int = 2) -> Document:
    finding = Finding(
        sentence=" ".join(names), fix=names[1], evidence=(Evidence(names[0], ({names[0]: names[1]},)),),
        falsified_by=names[2], saving_ns=1e6, derived=names[3], id="host_stall",
    )  # fmt: skip
    diagnosis = Diagnosis(
        step_ns=1e7, is_measured=True, findings=(finding,) * num_findings, clean=names[:2],
        unchecked=(Unchecked(names[0], names[1]),), suppressed=(), binds=names[0], gpu_busy_share=0.5,
        warnings=names[:3],
    )  # fmt: skip
    rows = list(names) * num_rows
    columns = {names[0]: rows, "total_ns": [float("nan"), *[-1] * (len(rows) - 1)]}
    table = Table("table", names[0], columns, num_shown=40, note=names[1])
    facts = Facts(tuple(Fact(name, name, name) for name in names), names[0])
    texts = [Text(name) for name in names]
    return Document(
        names[0], names[1],
        (
            Section("overview", names[2], (facts, *texts, findings_part(diagnosis, names[0]), table)),
            Section("charts", names[3], tuple(charts(names))),
            Section("none", names[4], (Missing(names[5]),)),
        ),
        {"source": names[0], "share": float("inf")},
    )  # fmt: skip
