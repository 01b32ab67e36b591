"""Charts as PNG, for papers and pull requests: drawn by matplotlib, the same bytes for the same chart."""

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from stepscope.document.model import Bars, Chart, Heat, Lines, Node, Scatter, Tree
from stepscope.formatting import cell, heading, percent, shortened
from stepscope.render.colors import children_of, colors_of_nodes, depth_of, ink_on
from stepscope.render.files import missing
from stepscope.render.png.charts import draw_bars, draw_heat, draw_lines, draw_scatter, drawn

_DEPTH = 8
_LETTER, _LINE = 0.0063, 0.030  # of the picture: how wide a letter is, how high a line of text
_LEAST = 0.0015  # a narrower tile cannot be seen
_NOTHING = 1e-9


class Tile(NamedTuple):
    """A place from the upper left corner, in shares of the picture."""

    x: float
    y: float
    width: float
    height: float


def draw_tree(axes: Any, chart: Tree) -> None:
    """The tiles with as much of their names as fits; what is too small to be seen is counted."""
    from matplotlib.patches import Rectangle

    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(1, 0))
    if not chart.nodes:
        return
    children, colors, root = children_of(chart.nodes), colors_of_nodes(chart.nodes), chart.nodes[0]
    is_icicle = chart.shape == "icicle"  # it keeps its order: forward before backward, layers as they run
    depth = min(_DEPTH, depth_of(chart.nodes))
    placed = [(root, Tile(0, 0, 1, min(1.0, 0.16 * depth) / depth if is_icicle else 1), 0)]
    num_drawn = 0
    while placed:
        node, tile, level = placed.pop()
        inner = children.get(node.id, []) if level + 1 < _DEPTH else []
        inner = inner if is_icicle else sorted(inner, key=lambda child: -child.value)
        is_group = bool(inner) and not is_icicle
        # Lighter the deeper it is; what has parts is lighter than them.
        share = min(0.75, 0.28 + 0.09 * level) if is_group else min(0.5, 0.06 * level)
        parts = [int(colors[node.id][at : at + 2], 16) for at in (1, 3, 5)]
        face = "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
        axes.add_patch(Rectangle(tile[:2], *tile[2:], facecolor=face, edgecolor="#ffffff", linewidth=1.0))
        lines = _lines(chart, node, tile, is_group)
        if lines and (not is_group or _has_line(tile)):  # else its parts lie over its name
            axes.text(
                tile.x + 0.004, tile.y + 0.006, "\n".join(lines), ha="left", va="top", fontsize=8.5,
                color=ink_on(face), linespacing=1.15, clip_on=True,
            )  # fmt: skip
        num_drawn += 1
        places = _icicle(node, inner, tile) if is_icicle else _treemap(node, inner, tile)
        placed += [(n, t, level + 1) for n, t in zip(inner, places) if t.width >= _LEAST and t.height >= _LEAST]
    if num_drawn < len(chart.nodes):
        said = f"{len(chart.nodes) - num_drawn:,} of {len(chart.nodes):,} parts are too small or too deep to be drawn"
        axes.text(1, 1.02, said, ha="right", va="top", fontsize=8, color="#555555")


def _lines(chart: Tree, node: Node, tile: Tile, is_group: bool) -> list[str]:
    """As much of the name and of the figures as fits into a tile."""
    letters, total = int((tile.width - 0.008) / _LETTER), chart.nodes[0].value
    if letters < 3 or tile.height < _LINE:
        return []
    name = shortened(drawn(node.name, 300), letters)
    figures = f"{cell(chart.unit, node.value)} · {percent(node.value / total)}" if total else ""
    if is_group or tile.height < 2 * _LINE:
        return [f"{name}  {figures}" if len(name) + len(figures) + 2 <= letters else name]
    return [name, figures] if len(figures) <= letters else [name]


def _icicle(node: Node, children: Sequence[Node], tile: Tile) -> list[Tile]:
    """Below the parent, side by side; what the parent has for itself stays free on the right."""
    if not node.value:
        return []
    scale = tile.width / max(node.value, math.fsum(child.value for child in children))
    starts = accumulate((child.value * scale for child in children), initial=tile.x)
    return [Tile(x, tile.y + tile.height, child.value * scale, tile.height) for x, child in zip(starts, children)]


def _treemap(node: Node, children: Sequence[Node], tile: Tile) -> list[Tile]:
    """Within the parent, below a line for its name where there is room."""
    if not node.value or not children:
        return []
    line = _LINE if _has_line(tile) else 0.0
    inner = Tile(tile.x + 0.002, tile.y + line + 0.002, tile.width - 0.004, tile.height - line - 0.004)
    if inner.width <= 0 or inner.height <= 0:
        return []
    own = max(0.0, node.value - math.fsum(child.value for child in children))
    tiles = squarified([child.value for child in children] + ([own] if own else []), inner)
    return tiles[: len(children)]


def _has_line(tile: Tile) -> bool:
    return tile.height > 3 * _LINE and tile.width > 8 * _LETTER


def squarified(values: Sequence[float], tile: Tile) -> list[Tile]:
    """A tile of that share of the whole for each value, none negative, from the largest on as square as they get.

    After Bruls, Huizing and van Wijk, "Squarified Treemaps", 2000: a strip along the shorter side takes values for as
    long as that makes its worst tile squarer.

    >>> [(tile.x, tile.y, tile.width, tile.height) for tile in squarified([2, 1, 1], Tile(0, 0, 2, 1))]
    [(0, 0.0, 1.0, 1.0), (1.0, 0.0, 1.0, 0.5), (1.0, 0.5, 1.0, 0.5)]
    """
    order = sorted(range(len(values)), key=lambda place: (-values[place], place))
    total = math.fsum(values)
    shares = [values[place] / total if total else 0.0 for place in order]
    # What is far too small to be seen has no place: its sides could not be told from nothing.
    areas = [share * tile.width * tile.height if share > _NOTHING else 0.0 for share in shares]
    tiles: list[Tile] = []
    start = 0
    while start < len(areas):
        side = min(tile.width, tile.height)
        end = start + 1
        while end < len(areas) and _worst(areas[start : end + 1], side) <= _worst(areas[start:end], side):
            end += 1
        strip, tile = _strip(areas[start:end], tile)
        tiles += strip
        start = end
    found = dict(zip(order, tiles))
    return [found[place] for place in range(len(values))]


def _worst(areas: Sequence[float], side: float) -> float:
    """How far the least square tile of a strip is from a square."""
    total = math.fsum(areas)
    if not total or not min(areas) or not side:
        return math.inf
    return max(side * side * max(areas) / (total * total), total * total / (side * side * min(areas)))


def _strip(areas: Sequence[float], tile: Tile) -> tuple[list[Tile], Tile]:
    """Tiles along the shorter side, and what is left of the place."""
    x, y, width, height = tile
    side, across = min(width, height), max(width, height)
    thick = min(math.fsum(areas) / side if side else 0.0, across)
    lengths = [area / thick if thick else 0.0 for area in areas]
    places = list(zip(accumulate(lengths, initial=0.0), lengths))
    if width >= height:
        return [Tile(x, y + at, thick, length) for at, length in places], Tile(x + thick, y, width - thick, height)
    return [Tile(x + at, y, length, thick) for at, length in places], Tile(x, y + thick, width, height - thick)


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
    Bars: draw_bars,
    Lines: draw_lines,
    Scatter: draw_scatter,
    Heat: draw_heat,
    Tree: draw_tree,
}


def _head(figure: Any, chart: Chart, lines: Sequence[str]) -> None:
    top = 1 - 0.10 / HEIGHT_INCHES
    figure.text(0.012, top, drawn(heading(chart.title), 110), ha="left", va="top", fontsize=14, fontweight="bold")
    for number, line in enumerate(lines):
        below = top - (0.27 + 0.20 * number) / HEIGHT_INCHES
        figure.text(0.012, below, line, ha="left", va="top", fontsize=10, color="#444444")
