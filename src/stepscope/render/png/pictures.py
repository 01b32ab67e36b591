"""Charts as PNG, for papers and pull requests: drawn by matplotlib, the same bytes for the same chart."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepscope.document.model import Bars, Chart, Heat, Lines, Scatter, Tree
from stepscope.formatting import fit_names, heading, safe
from stepscope.render.axes import log_ticks, tick_text
from stepscope.render.files import missing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES, DOTS_AN_INCH = 12.0, 7.0, 100
_CAPTION = 145
"""Characters a line below the title."""
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
        _drawer(chart)(axes, chart)
        stream = io.BytesIO()
        # No date and no version: the same chart is the same file.
        figure.savefig(stream, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True})
    return stream.getvalue()


def _drawer(chart: Chart) -> Any:
    from stepscope.render.png import charts, trees

    drawers = {
        Bars: charts.draw_bars,
        Lines: charts.draw_lines,
        Scatter: charts.draw_scatter,
        Heat: charts.draw_heat,
        Tree: trees.draw_tree,
    }
    for kind, drawer in drawers.items():
        if isinstance(chart, kind):
            return drawer
    raise TypeError(f"no picture for {type(chart).__name__}")


def _head(figure: Figure, chart: Chart, lines: Sequence[str]) -> None:
    """The title, and below it what is seen."""
    top = 1 - 0.10 / HEIGHT_INCHES
    figure.text(0.012, top, drawn(heading(chart.title), 110), ha="left", va="top", fontsize=14, fontweight="bold")
    for number, line in enumerate(lines):
        below = top - (0.27 + 0.20 * number) / HEIGHT_INCHES
        figure.text(0.012, below, line, ha="left", va="top", fontsize=10, color="#444444")


def drawn(text: object, most: int = 60) -> str:
    """Somebody else's text as the font can draw it, in one line; □ for what it has no sign for."""
    return "".join(sign if ord(sign) in _signs() else "□" for sign in safe(text, most))


def drawn_apart(names: Sequence[object], room: int) -> list[str]:
    """Names in so many characters, different ones still different where that can be."""
    return fit_names([drawn(name, 1000) for name in names], room)


_SIGNS: set[int] = set()


def _signs() -> set[int]:
    """What the font can draw."""
    if not _SIGNS:
        from matplotlib.font_manager import findfont, get_font

        # A legend leaves names out that begin with a low line; a font has no sign for line ends.
        _SIGNS.update(get_font(findfont("DejaVu Sans")).get_charmap())
    return _SIGNS


def is_figure(value: float | None) -> bool:
    """Whether there is something to draw."""
    return value is not None and math.isfinite(value)


def plain_ticks(axis: Any, values: Sequence[float], is_log: bool, exact: bool = False) -> None:
    """Figures on an axis, without powers of ten; `exact`: at whole ones."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    if exact and not is_log and all(value == round(value) for value in values if math.isfinite(value)):
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if is_log and (ticks := log_ticks(values, exact)):
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_locator(FixedLocator(ticks))


def legend(axes: Axes, handles: Sequence[Any], names: Sequence[str], title: str = "") -> None:
    """Names beside the chart, never on it."""
    if not handles:
        return
    # A name that begins with a low line would be left out.
    texts = [f" {name}" if name.startswith("_") else name for name in drawn_apart(names, 28)]
    size = 10 if len(names) <= 24 else 7
    axes.legend(handles, texts, loc="upper left", bbox_to_anchor=(1.01, 1.0), title=title or None, fontsize=size)


def brightness(color: str) -> float:
    """As eyes see it, from 0 to 1.

    >>> brightness("#000000"), round(brightness("#ffffff"), 3)
    (0.0, 1.0)
    """
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue
