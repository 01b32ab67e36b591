"""PNG: every kind of chart, any name, the same bytes each time, nobody's settings touched."""

from __future__ import annotations

import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile_names import charts
from parametrized import parametrized
from stepscope.document.model import Bars, Heat, Lines, Scatter, Series, Tree
from stepscope.errors import MissingDependencyError
from stepscope.render.page.plotly_charts import figure_of
from stepscope.render.png.pictures import Tile, squarified

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.figure import Figure

from stepscope.render.png.charts import (
    draw_lines,
    drawn,
    drawn_apart,
)
from stepscope.render.png.pictures import png_of


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@parametrized("chart", charts(), quick=5, ids=lambda chart: chart.id)
def test_every_chart_of_any_names_is_a_picture(chart):
    """Warnings are errors here: a sign that the font lacks, a formula in a name would fail."""
    png = png_of(chart)

    assert size_of(png) == (1200, 700) and len(png) < 300_000


EMPTY = (
    Bars(id="b", title="", labels=(), series=(), unit="total_ns"),
    Lines(id="l", title="", x="x", y="y", series=()),
    Lines(id="a", title="", x="x", y="y", series=(Series("a", ()),), style="areas", log_x=True, log_y=True),
    Lines(id="n", title="", x="x", y="y", series=(Series("a", [float("nan"), None], [0.0, -1.0]),), log_x=True),
    Scatter(id="s", title="", x="x", y="y", points=()),
    Tree(id="t", title="", shape="treemap", unit="total_ns", nodes=()),
    Heat(id="h", title="", x_title="", y_title="", x_labels=["a"], y_labels=["b"], unit="x_ns", values=[[None]],
         texts=[["oom"]]),
)  # fmt: skip


@parametrized("chart", EMPTY, quick=3, ids=lambda chart: chart.id)
def test_a_chart_of_nothing_is_a_picture_too(chart):
    assert size_of(png_of(chart)) == (1200, 700)


def test_the_same_chart_is_the_same_file_whatever_the_users_settings_are():
    chart = charts(("a", "b", "c", "d", "e", "f", "g", "h", "i", "j"))[2]
    first = png_of(chart)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "figure.facecolor": "red"}):
        assert png_of(chart) == first
        assert matplotlib.rcParams["font.size"] == 30
    assert b"Software" not in first and b"tIME" not in first


def test_a_status_is_drawn_and_no_figure_in_its_place():
    def lines(y, gaps):
        series = (Series("a", [1e6, 2e6], [1.0, 2.0]), Series("b", [2e6, y], [1.0, 2.0], gaps=gaps))
        return png_of(Lines(id="l", title="", x="x", y="time_ns", series=series))

    without = lines(None, ())
    assert len({without, lines(None, ("", "oom")), lines(None, ("", "timeout")), lines(3e6, ("", ""))}) == 4


@pytest.mark.parametrize("style", ["steps", "areas"])
def test_the_last_level_ends_once_on_the_page_and_in_the_picture(style):
    chart = Lines(id="l", title="", x="step", y="time_ns", series=(Series("a", [3.0, 4.0], [7, 8]),), style=style)
    axes = Figure().add_subplot()
    draw_lines(axes, chart)

    assert axes.dataLim.x1 == 9
    (trace,) = figure_of(chart)["data"]
    assert (trace["x"], trace["y"]) == ([7, 8, 9], [3, 4, 4]) and len(trace["hovertext"]) == 3


def test_an_axis_says_the_same_on_the_page_and_in_the_picture():
    chart = Lines(id="l", title="", x="num_tokens", y="flops_per_s", series=(Series("a", [3e12], [8]),), log_x=True)
    axes = Figure().add_subplot()
    draw_lines(axes, chart)
    layout = figure_of(chart)["layout"]

    assert axes.get_ylabel() == layout["yaxis"]["title"]["text"] == "TFLOP/s"
    assert axes.get_xlabel() == layout["xaxis"]["title"]["text"] == "tokens"
    assert list(axes.get_xticks()) == layout["xaxis"]["tickvals"] == [8]


def test_names_are_drawn_as_the_font_can():
    assert drawn("漢字 ok\x1b\u202e") == "□□ ok??"
    assert drawn("$x$") == "$x$"
    assert len(set(drawn_apart(["a" * 500 + "1", "a" * 500 + "2"], 20))) == 2


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(MissingDependencyError, match=r"pip install 'stepscope\[png\]'$"):
        png_of(EMPTY[0])


@given(
    st.lists(st.floats(0, 1e9), min_size=1, max_size=20),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
)
def test_tiles_have_their_share_and_do_not_overlap(values, width, height):
    tiles = squarified(values, Tile(1.0, 2.0, width, height))
    total = sum(values)

    for value, tile in zip(values, tiles, strict=True):
        assert tile.width >= 0 and tile.height >= 0
        assert tile.x >= 1 - 1e-6 and tile.x + tile.width <= 1 + width + 1e-6
        assert tile.y >= 2 - 1e-6 and tile.y + tile.height <= 2 + height + 1e-6
        if total > 1e-300:
            assert tile.width * tile.height == pytest.approx(width * height * value / total, abs=1e-6)
    for at, one in enumerate(tiles):
        for other in tiles[at + 1 :]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(across, down) <= 1e-6
