"""Charts as PNG, for papers and pull requests: drawn by matplotlib, the same bytes for the same chart."""

import io
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from stepscope.document.model import Bars, Chart, Heat, Lines, Scatter, Tree
from stepscope.formatting import heading
from stepscope.render.files import missing
from stepscope.render.png import charts, trees
from stepscope.render.png.drawing import drawn

WIDTH_INCHES, HEIGHT_INCHES, DOTS_AN_INCH = 12.0, 7.0, 100
_CAPTION = 145  # characters a line below the title
_STYLE = {
    "text.parse_math": False,  # a name with two $ in it is no formula
    "font.family": ["DejaVu Sans"],  # the one that comes with matplotlib
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": "#666666",
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
}


def png_of(chart: Chart) -> bytes:
    """A picture of 1200 × 700 pixels; MissingDependencyError where matplotlib is not there."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise missing("matplotlib") from None
    # Whatever the user's own settings are; the back end of their windows is not touched.
    default = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    settings: dict[Any, Any] = {**default, **_STYLE}
    with matplotlib.rc_context(settings):
        lines = textwrap.wrap(drawn(chart.caption, 600), _CAPTION)[:3]
        below = 1 - (0.40 + 0.20 * len(lines)) / HEIGHT_INCHES
        layout = ConstrainedLayoutEngine(rect=(0.005, 0.0, 0.99, below))
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_AN_INCH, layout=layout)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _head(figure, chart, lines)
        _DRAWERS[type(chart)](axes, chart)
        stream = io.BytesIO()
        # No date and no version: the same chart is the same file.
        figure.savefig(stream, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True})
    return stream.getvalue()


_DRAWERS: dict[type[Chart], Callable[[Any, Any], None]] = {
    Bars: charts.draw_bars,
    Lines: charts.draw_lines,
    Scatter: charts.draw_scatter,
    Heat: charts.draw_heat,
    Tree: trees.draw_tree,
}


def _head(figure: Any, chart: Chart, lines: Sequence[str]) -> None:
    top = 1 - 0.10 / HEIGHT_INCHES
    figure.text(0.012, top, drawn(heading(chart.title), 110), ha="left", va="top", fontsize=14, fontweight="bold")
    for number, line in enumerate(lines):
        below = top - (0.27 + 0.20 * number) / HEIGHT_INCHES
        figure.text(0.012, below, line, ha="left", va="top", fontsize=10, color="#444444")
