"""Markdown: fits a comment whatever it is of, and no name is more than text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from hostile_names import NAMES, charts, report
from stepscope.document.model import Bars, Document, Heat, Lines, Missing, Section, Series, Table, Text
from stepscope.formatting import safe
from stepscope.render.markdown.markdown import MOST_CHARACTERS, chart_lines, markdown_of
from stepscope.render.markdown.text import code, escaped, in_summary, prose

OURS = {"details", "summary", "b", "sub", "br"}
MADE = {"p", "h2", "h3", "ul", "ol", "li", "strong", "code", "table", "thead", "tbody", "tr", "th", "td", "a", "img"}


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.attributes, self.cells = set(), [], []

    def handle_starttag(self, tag, attrs):
        self.found.add(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


def rendered(text):
    """As a forge reads it, before it looks for mentions."""
    markdown_it = pytest.importorskip("markdown_it")
    tags = Tags()
    tags.feed(markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))
    return tags


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_text_in_a_cell_in_a_paragraph_and_in_a_summary(name):
    cell = rendered(f"| a |\n|---|\n| {escaped(name)} |\n")
    assert cell.found <= {"table", "thead", "tbody", "tr", "th", "td"}
    assert cell.cells[0].strip().replace("\u200b", "") == safe(name).strip()

    assert rendered(prose(name)).found <= {"p", "code"}
    assert rendered(f"1. {code(name)}\n").found <= {"ol", "li", "code"}
    folded = rendered(f"<details><summary>{in_summary(name)}</summary>\n\ntext\n\n</details>\n")
    assert folded.found == {"details", "summary", "p"}
    for text in (escaped(name), prose(name), in_summary(name)):
        assert "\n" not in text and all(sign.isprintable() or sign == "\u200b" for sign in text)


def test_nobody_is_called_and_nothing_is_referred_to():
    for text in (escaped, in_summary, prose):
        said = text("@octocat #123 GH-12 www.evil.example https://evil.example $x$")
        assert not re.search(r"@\w|#\d|GH-\d", said)
    assert "www\\." in escaped("www.evil.example") and ":\\/" not in escaped("https://x")
    assert re.search(r"https\\:", escaped("https://evil.example")) and "\\$" in escaped("$x$")


def test_a_whole_report_of_such_names_has_our_markup_only():
    text = markdown_of(report())
    found = rendered(text)

    assert found.found <= OURS | MADE - {"a", "img"}, found.found - OURS - MADE
    assert not found.attributes or {tag for tag, *_ in found.attributes} <= {"th", "td"}
    assert all(sign.isprintable() or sign in "\n\u200b" for sign in text)


def test_beside_charts_and_tables_it_links_them():
    text = markdown_of(report(), in_folder=True)
    found = rendered(text)

    links = {value for tag, name, value in found.attributes if name in ("href", "src")}
    assert links == {"tables/table.csv", *(f"charts/{chart.id}.png" for chart in charts())}


@pytest.mark.parametrize(("num_rows", "num_findings"), [(1, 2), (40, 200), (4000, 1)])
def test_it_fits_a_comment_whatever_it_is_of(num_rows, num_findings):
    for in_folder in (False, True):
        text = markdown_of(report(num_rows=num_rows, num_findings=num_findings), in_folder)
        assert len(text) < MOST_CHARACTERS
        assert len(re.findall("^<details>", text, re.M)) == len(re.findall("^</details>", text, re.M)) > 0


def test_many_sections_are_cut_with_words():
    sections = tuple(
        Section(f"s{number}", f"Section {number}", (Text("word " * 400),) * 3) for number in range(80)
    )  # fmt: skip
    text = markdown_of(Document("t", "v", sections))

    assert len(text) < MOST_CHARACTERS and "The rest does not fit" in text and "Section 1<" in text


def test_rows_that_are_not_shown_are_counted():
    table = Table("t", "T", {"kernel": [f"n{number}" for number in range(50)], "total_ns": range(50)}, num_shown=5)
    found = Document("r", "v", (Section("overview", "O", (table,)),))

    assert "45 more rows in the CSV" in markdown_of(found)
    assert "45 more rows in [tables/t.csv](tables/t.csv)" in markdown_of(found, in_folder=True)
    assert markdown_of(found).count("\n| n") == 5


def test_what_is_missing_is_said_at_the_end_with_what_to_run():
    found = Document("r", "v", (Section("a", "Roofline", (Missing("run `stepscope run x.py`"),)),))

    assert "- Roofline: run `stepscope run x.py`" in markdown_of(found)


def test_bars_have_figures_and_lengths_and_a_gap_its_reason():
    series = Series("s", [4e6, 1e6, None], gaps=["", "", "oom"])
    lines = chart_lines(Bars(id="b", title="B", labels=["x", "y", "z"], series=(series,), unit="total_ns"), 9, 40)

    assert lines[2:] == ["| x | 4.00 ms | ████████████████ |", "| y | 1.00 ms | ████ |", "| z | oom |  |"]


def test_lines_and_heat_maps_are_tables_and_statuses_stay_words():
    series = (Series("a", [1e6, None], [128.0, 256.0], gaps=["", "oom"]), Series("b", [2e6], [128.0]))
    line = chart_lines(Lines(id="l", title="L", x="seq_len", y="time_ns", series=series), 9, 40)
    heat = Heat(id="h", title="H", x_title="x", y_title="y", x_labels=["1", "2"], y_labels=["a"], unit="time_ns",
                values=[[1e6, None]], texts=[["1.00 ms", "oom"]])  # fmt: skip

    assert line[2:] == ["| a | 1.00 ms | oom |", "| b | 2.00 ms |  |"]
    assert chart_lines(heat, 9, 40)[2:] == ["| a | 1.00 ms | oom |"]


def test_a_long_line_is_its_course():
    series = Series("a", [float(value) for value in range(100)], [float(value) for value in range(100)])
    lines = chart_lines(Lines(id="l", title="L", x="step", y="loss", series=(series,)), 9, 40)

    assert "| a | 0 | 99.0 | 99.0 | `▁" in lines[2] and lines[2].endswith("█` |")
    assert "over step from 0 to 99.0" in lines[4]


@pytest.mark.parametrize("chart", charts(), ids=lambda chart: chart.id)
def test_every_chart_is_a_table_with_whole_rows(chart):
    lines = [line for line in chart_lines(chart, 12, 40) if line.startswith("|")]

    assert len(lines) > 2
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
