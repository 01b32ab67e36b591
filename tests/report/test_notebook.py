"""Results in a notebook: the figures of the text, strangers' names as text, nothing that runs."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import stepscope
from handmade import cpu_recording
from memories import a_step, write_memory
from stepscope.analysis.comparison.sweeps import sweep_of
from stepscope.api.displays import document_of
from stepscope.findings.finding import Finding
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.memory_scaling import analyze_memory
from trace_builder import TraceBuilder

NASTY = "</pre><script>alert(1)</script>\"'\n\u202e\x1b[31m<img src=x onerror=alert(1)>" + "y" * 5000
ALLOWED = {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"}
RUN = {
    "mode": "step", "dtype": "bf16", "bf16_reduction": "auto", "compile": "off", "sdpa": "free",
    "optimizer": "adamw", "warmup": 3, "steps": 3, "seed": 0, "device": "cuda",
}  # fmt: skip


class Parsed(HTMLParser):
    """Tags with their attributes, and the cells of tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def hold(found: object) -> list[list[str]]:
    """Nothing runs or asks, tags are few, every figure of the tables is in the text, and `repr` is one line."""
    assert "\n" not in repr(found) and len(repr(found)) < 200 and "\x1b" not in repr(found)
    page, text = found._repr_html_(), terminal_text(document_of(found), 300)
    parsed = Parsed(page)
    assert {tag for tag, _ in parsed.tags} <= ALLOWED
    assert all(set(attributes) <= {"style"} for _, attributes in parsed.tags)
    styles = " ".join(attributes.get("style", "") for _, attributes in parsed.tags)
    assert "color" not in styles and "url" not in styles
    assert "\x1b" not in page and "\u202e" not in page
    one_line = re.sub(r"\s+", " ", text)
    assert len(parsed.rows) > 1
    figures = [
        cell for row in parsed.rows for cell in row[1:] if re.fullmatch(r"[−+\d.,]+ ?(%|ns|µs|ms|s|[KMG]?i?B)?", cell)
    ]
    assert figures
    assert not [figure for figure in figures if figure not in one_line]
    return parsed.rows


@pytest.fixture
def trace(tmp_path) -> Path:
    made = TraceBuilder()
    for step in (1, 2):
        at = 1000 * step
        made.step(step, at, 900).op(NASTY, at + 5, 200, id=step).launch(NASTY, at + 10, (at + 30, 333), id=step)
        made.op("aten::add", at + 500, 200, id=step + 50).launch("add", at + 510, (at + 520, 77), id=step + 50)
    return made.write(tmp_path / "trace.json")


def test_an_analysis(trace):
    found = stepscope.analyze(trace)
    rows = hold(found)

    (forward,) = [row for row in rows if row[0] == "forward"]
    assert {"695 µs", "77.2 %", "410 µs", "2"} <= set(forward)
    assert ["compute", "820 µs"] in rows
    assert "&lt;script&gt;" in found._repr_html_() and "<script" not in found._repr_html_()


def test_a_diagnosis(trace):
    found = stepscope.diagnose(trace)
    page = found._repr_html_()

    assert "718 µs" in page and document_of(found).verdict in page
    assert "<script" not in page


def test_a_finding_has_its_saving_and_its_sentence(trace):
    finding = Finding(
        sentence=NASTY, fix="type it", evidence=(), falsified_by="", saving_ns=1_234_567, id="launch_bound"
    )
    found = replace(stepscope.diagnose(trace), findings=(finding,))
    page = found._repr_html_()

    (row,) = [row for row in Parsed(page).rows if row[0] == "launch_bound"]
    assert row[1].startswith("1.23 ms") and row[2].startswith("</pre><script>") and row[3] == "type it"
    assert "<script" not in page and "\x1b" not in page
    assert "launch_bound" in repr(finding) and "\n" not in repr(finding) and len(repr(finding)) < 200


def test_a_what_if(trace):
    rows = hold(stepscope.what_if(trace, scale=[("kernel=add", 0.5)]))

    assert [row[0] for row in rows][-3:] == ["in the trace", "replayed", "changed"]


def test_a_comparison(trace, tmp_path):
    other = TraceBuilder()
    for step in (1, 2):
        at = 1000 * step
        other.step(step, at, 950).op(NASTY, at + 5, 200, id=step).launch(NASTY, at + 10, (at + 30, 500), id=step)
    rows = hold(stepscope.compare(trace, other.write(tmp_path / "other.json")))

    assert ["step time", "0.9000 ms", "0.9500 ms", "+5.6 %"] in [row[:4] for row in rows]


def test_an_analysis_of_memory(tmp_path):
    rows = hold(analyze_memory([open_session(write_memory(tmp_path / "memory.json.gz", a_step()))]))

    assert ["activation", "1.17 KiB", "29.3 %"] in [row[:3] for row in rows]


def test_a_sweep():
    figures = {"num_tokens": 4096, "num_parameters": 10**6, "environment_hash": "e", "peak_allocated_bytes": 3 << 30}
    rows = [
        {"hash": f"h{n}", "workload": "cs336", "preset": "small", "config": {"attention": name, "seq_len": 128},
         "run": RUN, "status": "ok", "reason": None, "reference": {"attention": "naive"},
         "samples_device_ns": [ns] * 6, "samples_host_ns": [ns] * 6, **figures}
        for n, (name, ns) in enumerate((("naive", 57_000_000), ("<b>sdpa</b>", 20_000_000)))
    ]  # fmt: skip
    shown = hold(sweep_of(rows, {}))

    assert shown[0][0] == "attention" and shown[2][0] == "<b>sdpa</b>"


def test_a_card(tmp_path):
    found = stepscope.read(cpu_recording(tmp_path / "run"))

    assert "<b>A step takes 10.00 ms" in found._repr_html_() and "\n" not in repr(found)
