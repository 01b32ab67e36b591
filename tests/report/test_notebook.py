"""Results in a notebook: the figures of the text, strangers' names as text, nothing that runs."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from stepscope.document.text.compare_text import compare_text
from stepscope.document.text.findings_text import diagnosis_text
from stepscope.document.text.sweeps import sweep_of, sweep_text
from stepscope.document.text.whatif_text import whatif_text

import stepscope
from handmade import cpu_recording
from memories import a_step, write_memory
from stepscope.document.text.memory_text import memory_text
from stepscope.document.text.trace_text import analysis_text
from stepscope.findings.finding import Finding
from stepscope.session import open_session
from stepscope.session.memory_growth import analyze_memory
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


def hold(page: str, text: str) -> list[list[str]]:
    """Nothing runs or asks, tags are few, and every figure of the tables is in the text."""
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
    rows = hold(found._repr_html_(), analysis_text(found, 8))

    assert ["forward", "695.0 µs", "77.2 %", "410.0 µs", "2"] in rows
    assert any(row[0] == "kernels" for row in rows)
    assert any(row[1:] == ["2", "333 µs", "666.0 µs", "81.2 %"] for row in rows)
    assert "&lt;script&gt;" in found._repr_html_()


def test_a_diagnosis(trace):
    found = stepscope.diagnose(trace)
    page = found._repr_html_()

    assert diagnosis_text(found, False, 100).splitlines()[0].split(" (")[0] in page
    assert "<script" not in page


def test_a_finding_has_its_saving_and_its_sentence(trace):
    finding = Finding(
        sentence=NASTY, fix="type it", evidence=(), falsified_by="", saving_ns=1_234_567, id="launch_bound"
    )
    found = replace(stepscope.diagnose(trace), findings=(finding,))

    rows = hold(found._repr_html_(), diagnosis_text(found, False, 100))
    assert rows[1][:3] == ["launch_bound", "1.23 ms", "–"] and rows[1][3].startswith("</pre><script>")


def test_a_what_if(trace):
    found = stepscope.what_if(trace, scale=[("kernel=add", 0.5)])
    rows = hold(found._repr_html_(), whatif_text(found))

    assert [row[0] for row in rows] == ["", "in the trace", "replayed", "changed"]


def test_a_comparison(trace, tmp_path):
    other = TraceBuilder()
    for step in (1, 2):
        at = 1000 * step
        other.step(step, at, 950).op(NASTY, at + 5, 200, id=step).launch(NASTY, at + 10, (at + 30, 500), id=step)
    found = stepscope.compare(trace, other.write(tmp_path / "other.json"))
    rows = hold(found._repr_html_(), compare_text(found, 8))

    assert rows[0][1:] == ["base", "new", "change", "95 % interval", "verdict"]


def test_an_analysis_of_memory(tmp_path):
    found = analyze_memory([open_session(write_memory(tmp_path / "memory.json.gz", a_step()))])
    rows = hold(found._repr_html_(), memory_text(found, 8))

    assert rows[0] == ["live at the peak", "size", "of the peak"]


def test_a_sweep():
    figures = {"num_tokens": 4096, "num_parameters": 10**6, "environment_hash": "e", "peak_allocated_bytes": 3 << 30}
    rows = [
        {"hash": f"h{n}", "workload": "cs336", "preset": "small", "config": {"attention": name, "seq_len": 128},
         "run": RUN, "status": "ok", "reason": None, "reference": {"attention": "naive"},
         "samples_device_ns": [ns] * 6, "samples_host_ns": [ns] * 6, **figures}
        for n, (name, ns) in enumerate((("naive", 57_000_000), ("<b>sdpa</b>", 20_000_000)))
    ]  # fmt: skip
    found = sweep_of(rows, {})
    shown = hold(found._repr_html_(), sweep_text(found, 300))

    assert shown[0][:2] == ["attention", "time ms"] and shown[2][0] == "<b>sdpa</b>"


def test_a_card(tmp_path):
    page = stepscope.read(cpu_recording(tmp_path / "run"))._repr_html_()
    assert page.startswith("<p><b>A step takes 10.00 ms")
