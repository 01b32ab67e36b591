"""The page as text: what is in it, what its policy allows, and names that stay names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from handmade import cpu_recording
from report_samples import EVIL, SHOWN, charts, sample_report, table
from stepscope import report
from stepscope.document.model import Bars, Chart, Document, Node, Section, Series, Tree
from stepscope.errors import MissingDependencyError
from stepscope.render.page import page as page_module
from stepscope.render.page.elements import table_data, with_code
from stepscope.render.page.page import page_of
from stepscope.render.page.plotly_charts import MOST_NODES, figure_of

ELEMENTS = {"html", "head", "meta", "title", "style", "script", "body", "header", "h1", "nav", "a", "div", "button",
            "dialog", "h3", "dl", "dt", "dd", "main", "p", "section", "h2", "span", "small", "article", "b", "h4",
            "h5", "pre", "code", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "figure",
            "figcaption", "noscript", "i", "aside", "footer"}  # fmt: skip


class Read(HTMLParser):
    """What a parser finds in a page: its elements, its text, its scripts by type."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[str, str]] = []
        self.policy = ""
        self._script: str | None = None
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.elements.append((tag, named))
        if tag == "script":
            self._script = named.get("type") or "text/javascript"
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"]

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = None

    def handle_data(self, data):
        if self._script is None:
            self.texts.append(data)
        else:
            self.scripts.append((self._script, data))


def sha(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def test_the_policy_names_every_script_by_its_hash_and_allows_nothing_else():
    read = Read(page_of(sample_report()))
    rules = dict(rule.strip().split(" ", 1) for rule in read.policy.split(";"))

    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    allowed = set(rules["script-src"].split())
    scripts = {sha(source) for kind, source in read.scripts if kind == "text/javascript"}
    assert scripts <= allowed
    assert allowed - scripts == {sha(page_module._plotly())}
    assert all("src" not in named for tag, named in read.elements if tag in ("script", "img", "link", "iframe"))


def test_a_hostile_name_makes_no_element_and_stands_in_the_text_as_it_is():
    read = Read(page_of(sample_report(EVIL)))

    assert {tag for tag, _ in read.elements} <= ELEMENTS
    handlers = [name for _, named in read.elements for name in named if name.startswith("on")]
    assert handlers == []
    assert SHOWN in "".join(read.texts)
    assert [kind for kind, _ in read.scripts].count(
        "text/javascript"
    ) == 3  # before the first paint, the page, the timeline


def test_data_in_the_page_is_json_that_nothing_in_it_can_end():
    source = page_of(sample_report(EVIL))
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.S).group(1)

    assert "<" not in inside
    data = json.loads(inside)
    assert data["tables"][0]["columns"][0]["texts"][0] == SHOWN


def test_a_page_of_a_typical_recording_is_small_and_one_without_charts_smaller(tmp_path):
    whole = page_of(report(cpu_recording(tmp_path / "run")))
    bare = page_of(Document("bare", "Nothing.", (Section("overview", "Overview", ()),)))

    assert len(whole.encode()) < 4_000_000
    assert len(bare.encode()) < 100_000
    assert 'id="plotly-blob"' in whole and 'id="plotly-blob"' not in bare


def test_without_plotly_one_line_says_what_to_install(monkeypatch):
    page_module._plotly.cache_clear()
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install plotly"):
        page_of(sample_report())


@pytest.mark.parametrize("section", charts(EVIL), ids=lambda section: section.id)
def test_figures_are_plain_json_and_their_names_no_markup_for_plotly(section):
    figure = figure_of(section.parts[0])
    text = json.dumps(figure, allow_nan=False)

    assert "<script" not in text and "<a " not in text
    assert "&lt;a href" in text


def test_axes_have_units_and_figures_are_in_them():
    bars, lines = (figure_of(one.parts[0]) for one in charts("gemm") if one.id in ("bars", "lines"))

    assert bars["layout"]["xaxis"]["title"]["text"] == "total (ms)"
    assert bars["data"][0]["x"] == [3.0, 1.0]
    assert bars["data"][0]["text"] == ["3.00 ms", "1.00 ms"]
    assert lines["layout"]["xaxis"]["title"]["text"] == "time (ms)"
    assert lines["data"][0]["y"] == [3.0, None, 1.0]
    assert lines["data"][0]["error_y"]["array"] == [1.0, None, 1.0]
    assert "3.00 ms (2.50 ms – 4.00 ms)" in lines["data"][0]["hovertext"][0]
    assert [note["text"] for note in lines["layout"]["annotations"]] == ["gemm", "gemm"]  # the mark, and the gap


def test_bars_have_their_intervals_and_say_why_one_is_absent():
    series = Series("a", [3e6, None, 1e6], low=[2.5e6, None, 0.5e6], high=[4e6, None, 2e6], gaps=["", "<oom>", ""])
    one = figure_of(Bars(id="b", title="b", labels=["x", "y", "z"], unit="total_ns", series=(series,)))
    two = figure_of(Bars(id="b", title="b", labels=["x", "y", "z"], unit="total_ns", series=(series, series)))

    assert one["data"][0]["error_x"]["array"] == [1.0, None, 1.0]
    assert one["data"][0]["error_x"]["arrayminus"] == [0.5, None, 0.5]
    assert "3.00 ms (2.50 ms – 4.00 ms)" in one["data"][0]["hovertext"][0]
    # The figures stand clear of the intervals, and there is room for the longest.
    notes = [(note["x"], note["y"], note["text"]) for note in one["layout"]["annotations"]]
    assert notes == [(4.0, 0, "3.00 ms"), (0.0, 1, "&lt;oom&gt;"), (2.0, 2, "1.00 ms")]
    assert one["layout"]["xaxis"]["range"][1] > 4.0
    assert [note["text"] for note in two["layout"]["annotations"]] == ["&lt;oom&gt;"]
    assert "&lt;oom&gt;" in two["data"][1]["hovertext"][1]


def test_a_cell_without_a_figure_says_why():
    heat = next(figure_of(one.parts[0]) for one in charts("oom") if one.id == "heat")

    assert heat["data"][0]["z"] == [[1.0, 2.0], [3.0, None]]
    assert [(note["x"], note["y"], note["text"]) for note in heat["layout"]["annotations"]] == [(1, 1, "oom")]


def test_a_large_tree_keeps_its_largest_parts_and_says_how_many_are_left_out():
    leaves = tuple(Node(f"n{number}", "all", f"n{number}", 1.0 + number) for number in range(MOST_NODES + 500))
    whole = sum(leaf.value for leaf in leaves) * (1 - 1e-15)  # as a sum in another order comes out
    tree = Tree(
        id="tree", title="tree", shape="icicle", unit="device_ns", nodes=(Node("all", "", "all", whole), *leaves)
    )
    figure = figure_of(tree)

    kept = figure["data"][0]
    assert len(kept["ids"]) == MOST_NODES and "n0" not in kept["ids"]
    assert figure["left_out"] == 501
    assert kept["values"][0] >= sum(kept["values"][1:])
    page = page_of(Document("t", "", (Section("s", "S", (tree,)),)))
    assert "501 parts are too small" in page


def test_a_long_table_is_cut_in_the_page_and_says_so():
    long = table("gemm", 3000)
    page = page_of(Document("t", "", (Section("s", "S", (long,)),)))

    assert table_data(long)["rows"] == 2000
    assert "the first 2,000 of 3,000 rows" in page
    assert page.count("<tr>") == 1 + 50


def test_what_is_to_be_typed_is_code_unless_its_marks_are_somebodys_own():
    assert with_code("run `a <b>` now") == "run <code>a &lt;b&gt;</code> now"
    assert with_code("it`s <b>") == "it`s &lt;b&gt;"


def test_a_notebook_shows_verdict_findings_and_tables_without_a_script():
    read = Read(sample_report(EVIL)._repr_html_())

    allowed = {"p", "b", "table", "thead", "tbody", "tr", "th", "td", "div", "details", "summary", "pre"}
    allowed |= {"svg", "title", "line", "path", "text"}  # charts
    assert {tag for tag, _ in read.elements} <= allowed
    text = "".join(read.texts)
    assert "A step takes 40.0 ms" in text and "12.3 ms" in text and SHOWN in text and "8 of 120 rows" in text


def test_every_chart_has_a_figure():
    kinds = {type(part) for section in charts("a") for part in section.parts}
    assert kinds == set(Chart.__subclasses__())
